"""What an answer must call: of a valid conversation whose `tool_choice` forces a call."""

from __future__ import annotations

from collections.abc import Sequence

from lineclear.errors import InvalidRequest
from lineclear.scheduler.text.call_formats import FORMATS
from lineclear.scheduler.text.call_grammar import ForcedCalls
from lineclear.scheduler.text.parsed_answer import AnswerParsers, phase_of
from lineclear.scheduler.text.reasoning_parser import MARKERS
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb


def is_forced(chat: pb.ChatMessages) -> bool:
    """Return whether the answer must be a call of one of the tools."""
    choice = chat.tool_choice
    if choice.WhichOneof("choice") == "function":
        return any(tool.name == choice.function for tool in chat.tools)
    return choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED and bool(chat.tools)


def forced_calls(
    chat: pb.ChatMessages, parsers: AnswerParsers, tokenizer: Tokenizer, prompt: Sequence[int]
) -> ForcedCalls:
    """Return the calls that the answer to a prompt must make. Raises InvalidRequest if their format is not known."""
    if not parsers.tool_calls:
        raise InvalidRequest.at(
            "chat.tool_choice",
            "cannot force a call: the format of calls is not known for this chat template (--tool-call-parser)",
        )
    function = chat.tool_choice.function
    tools = [tool for tool in chat.tools if not function or tool.name == function]
    markers = tokenizer.token_ids(FORMATS[parsers.tool_calls].markers | MARKERS)
    return ForcedCalls(
        parser=parsers.tool_calls,
        names=tuple(tool.name for tool in tools),
        parameters=tuple(tool.parameters for tool in tools),
        is_parallel=not function and (chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls")),
        phase=phase_of(parsers, tokenizer, prompt).value,
        markers=markers,
        tags=parsers.call_tags,
    )
