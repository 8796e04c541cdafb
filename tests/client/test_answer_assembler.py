"""The pieces in order are the answer; a missing, repeated or unfinished one is DataLoss."""

from __future__ import annotations

import pytest

from lineclear.client.answer_assembler import AnswerAssembler
from lineclear.client.results import FinishReason, Started, TokenLogprobs, TopLogprob, Usage
from lineclear.errors import DataLoss
from lineclear.v1 import inference_pb2 as pb


def test_responses_make_the_answer() -> None:
    assembly = AnswerAssembler()
    assert assembly.add(pb.GenerateResponse(started=pb.Started(request_id="r", seed=4))).started == Started("r", seed=4)
    logprobs = [pb.TokenLogprobs(logprob=-1.5, top_logprobs=[pb.TopLogprob(token_id=5, logprob=-0.5)])]
    assembly.add(pb.GenerateResponse(token_ids=[5], text="a", logprobs=logprobs, token_times_us=[1500]))
    delta = assembly.add(
        pb.GenerateResponse(
            first_index=1,
            text="b",
            finished=pb.Finished(
                finish_reason=pb.FINISH_REASON_STOP_STRING, matched_stop_string="!", usage=pb.Usage(completion_tokens=1)
            ),
        )
    )
    assembly.close()
    result = assembly.generation()
    assert delta.finish_reason is result.finish_reason is FinishReason.STOP_STRING
    assert (result.text, result.token_ids, result.matched_stop) == ("ab", (5,), "!")
    assert result.logprobs == (TokenLogprobs(-1.5, (TopLogprob(5, -0.5),)),)
    assert result.token_times_seconds == (0.0015,)
    assert (result.usage, result.started.seed) == (Usage(completion_tokens=1), 4)


def test_a_matched_token_is_its_id_even_when_that_is_zero() -> None:
    assembly = AnswerAssembler()
    assembly.add(pb.GenerateResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP_EOS, matched_token_id=0)))
    assert assembly.generation().matched_stop == 0


@pytest.mark.parametrize(("count", "index"), [(2, 0), (2, 1), (2, 3), (0, 1)])
def test_a_gap_or_a_repetition_is_data_loss(count: int, index: int) -> None:
    assembly = AnswerAssembler()
    assembly.add(pb.GenerateResponse(token_ids=range(count)))
    with pytest.raises(DataLoss) as caught:
        assembly.add(pb.GenerateResponse(first_index=index, token_ids=[3]))
    assert caught.value.metadata == {"expected_index": str(count), "received_index": str(index)}


def test_missing_logprobs_are_data_loss() -> None:
    with pytest.raises(DataLoss, match="2 tokens and 1 token times"):
        AnswerAssembler().add(pb.GenerateResponse(token_ids=[1, 2], token_times_us=[5]))
    with pytest.raises(DataLoss, match="1 tokens and 2 logprobs"):
        AnswerAssembler().add(pb.GenerateResponse(token_ids=[1], logprobs=[pb.TokenLogprobs(), pb.TokenLogprobs()]))


def test_early_or_late_end_is_data_loss() -> None:
    assembly = AnswerAssembler()
    assembly.add(pb.GenerateResponse(token_ids=[1]))
    with pytest.raises(DataLoss, match="after 1 tokens"):
        assembly.close()
    assembly.add(pb.GenerateResponse(finished=pb.Finished()))
    assembly.close()
    with pytest.raises(DataLoss, match="after the end"):
        assembly.add(pb.GenerateResponse(first_index=1, token_ids=[1]))
