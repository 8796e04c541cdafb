"""Render conversations in a separate process, which exits when a template takes too long.

jinja2's sandbox limits `range` and attributes but not time: an endless loop in a template would keep a thread and the
interpreter lock. `limited_child` has the loop and the limits of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lineclear.errors import InvalidRequest
from lineclear.scheduler.text.limited_child import Refused, pack, serve
from lineclear.scheduler.text.special_token_seal import Seal
from lineclear.scheduler.text.template_renderer import ChatMessage, ChatTemplate, Conversation
from lineclear.scheduler.text.tool_context import ToolContext


def pack_conversation(conversation: Conversation) -> bytes:
    """Return the content of a frame."""
    messages, opens, time_us, context = conversation
    roles = [message.role for message in messages]
    head = {"roles": roles, "opens": opens, "time_us": time_us, "tools": context.tools}
    head["message_fields"] = list(context.message_fields.items())
    return pack(head, [message.content for message in messages])


def conversation_of(head: Mapping[str, Any], contents: list[str]) -> Conversation:
    """Return the argument of the `pack_conversation` call that made a frame, its context parsed."""
    messages = list(map(ChatMessage, head["roles"], contents))
    context = ToolContext(head["tools"], dict(head["message_fields"])).parsed()
    return Conversation(messages, head["opens"], head["time_us"], context)


def _prepare(private: Mapping[str, str], max_bytes: int, **template: Any) -> Callable[[dict[str, Any], list[str]], str]:
    chat_template = ChatTemplate(seal=Seal(private), **template)

    def render(head: dict[str, Any], contents: list[str]) -> str:
        try:
            text = chat_template.render(conversation_of(head, contents))
            size = len(text.encode())
        except InvalidRequest as error:
            raise Refused(error.violations[0].description) from None
        except (MemoryError, UnicodeEncodeError):
            raise Refused("the model's chat template fails on this conversation") from None
        if size > max_bytes:
            raise Refused(f"the model's chat template makes more than {max_bytes} bytes of this conversation")
        return text

    return render


if __name__ == "__main__":
    serve(_prepare)
