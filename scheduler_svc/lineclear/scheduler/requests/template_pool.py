"""Render chat templates in child processes, which are killed when a template takes too long."""

from __future__ import annotations

from lineclear.scheduler.requests.limited_processes import LimitedProcesses, ProcessKilled, Work
from lineclear.scheduler.text.chat_template import ChatTemplate
from lineclear.scheduler.text.limited_child import ANSWERED
from lineclear.scheduler.text.template_renderer import not_taken


class TemplatePool(LimitedProcesses):
    """Renders conversations in child processes, one at a time in each. On one event loop."""

    def __init__(self, template: ChatTemplate, *, cpu_seconds: float, max_bytes: int, max_waiting: int) -> None:
        definition = template.definition(cpu_seconds=cpu_seconds, max_bytes=max_bytes)
        module = "lineclear.scheduler.text.template_process"
        what = "conversations are or wait to be rendered"
        super().__init__(Work("chat template", module, definition, cpu_seconds, max_bytes + 1024, max_waiting, what))
        self._cpu_seconds = cpu_seconds

    async def render(self, frame: bytes, cost: float) -> str:
        """Return a packed conversation as text with sealed special tokens.

        Raises InvalidRequest if the template rejects the conversation or takes too long, and QueueFull as `ask`.
        """
        try:
            answer = await self.ask(frame, cost)
        except ProcessKilled:
            raise not_taken(
                f"the model's chat template takes more than {self._cpu_seconds:g} s of CPU time for this conversation; "
                "send fewer or shorter messages, or raise --max-chat-template-seconds"
            ) from None
        text = answer[1:].decode()
        if answer[:1] != ANSWERED:
            raise not_taken(text)
        return text
