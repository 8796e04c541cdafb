"""What precedes the submission of a request: its prompt is tokenized, its form compiled, its answer so far replayed.

A request of token ids without texts, form or answer so far does not come here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from lineclear.errors import DeadlineExceeded, InvalidRequest
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.requests.output_stream import end_of
from lineclear.scheduler.requests.services import RequestServices
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate import sampling as sampling_validation
from lineclear.scheduler.requests.validate import tools
from lineclear.scheduler.requests.validate.request import ModelBounds, ValidatedRequest
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Sampling


async def prepare(
    services: RequestServices,
    validated: ValidatedRequest,
    message: pb.GenerateRequest,
    vocab_size: int,
    chat_time_us: int,
    seconds: float,
) -> tuple[Sequence[int], Sampling]:
    """Return the prompt and the complete sampling parameters. Raises DeadlineExceeded after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            prompt = await services.tokenizers.ids(message, chat_time_us)
            if message.truncate_prompt_tokens:
                prompt = prompt[-message.truncate_prompt_tokens :]
            sampling = await _with_texts(services, validated.sampling, message, vocab_size)
            if (grammar := await _grammar(services, validated, message, prompt)) is not None:
                sampling = replace(sampling, grammar=grammar)
            return prompt, sampling
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the prompt was tokenized") from None


async def _with_texts(
    services: RequestServices, sampling: Sampling, message: pb.GenerateRequest, vocab_size: int
) -> Sampling:
    """Tokenize the texts in the sampling parameters."""
    params, tokenizers = message.sampling, services.tokenizers
    if params.bad_words:
        words = await tokenizers.bad_words(tuple(params.bad_words))
        sampling = sampling_validation.with_bad_words(sampling, words, vocab_size)
    if sampling.dry_multiplier:
        breakers = await tokenizers.breakers(tuple(params.dry_sequence_breakers))
        sampling = sampling_validation.with_breakers(sampling, *breakers, vocab_size)
    return sampling


async def _grammar(
    services: RequestServices, validated: ValidatedRequest, message: pb.GenerateRequest, prompt: Sequence[int]
) -> str | None:
    """Compile the form of the answer here and on the workers; return None if it has none."""
    if validated.tools is not None and validated.tools.is_call_forced:
        calls = tools.forced_calls(message.chat, services.parsers, services.tokenizers.tokenizer, prompt)
        grammar = await services.grammars.grammar_of_calls(calls)
    elif message.sampling.HasField("structured_output"):
        grammar = await services.grammars.grammar(message.sampling.structured_output)
    else:
        return None
    loop, prepared = asyncio.get_running_loop(), asyncio.Event()

    def done() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(prepared.set)

    services.engine.prepare_grammar(grammar, done)
    await prepared.wait()
    return grammar


async def echo(
    services: RequestServices, validated: ValidatedRequest, prompt: Sequence[int], bounds: ModelBounds
) -> pb.PromptEcho:
    """Return the prompt as its answer begins with it. Raises PromptTooLong."""
    keep_special = validated.text_options["keep_special"]
    text = await services.tokenizers.decode(prompt, keep_special=keep_special, vocab_size=bounds.vocab_size)
    validation.check_echo(text, bounds)
    return pb.PromptEcho(text=text, token_ids=prompt)


def end_of_resumed(
    validated: ValidatedRequest, text: AnswerText | None, received: Sequence[int], max_tokens: int
) -> tuple[FinishReason, int | None] | None:
    """Return why the received tokens are a complete answer, and the stop token; None if they are not.

    Raises InvalidRequest if the answer was complete before the last token.
    """
    count, last = len(received), received[-1]
    if text is not None and (match := text.match) is not None:
        if match.num_tokens < count:
            message = "has tokens after a stop string, a repetition or the only call"
            raise InvalidRequest.at("resume.token_ids", message)
        return end_of(match), None
    if last in validated.sampling.stop_ids and count > validated.sampling.min_tokens:
        return (FinishReason.STOP_EOS if last in validated.fields["eos_ids"] else FinishReason.STOP_TOKEN), last
    return (FinishReason.LENGTH, None) if count == max_tokens else None
