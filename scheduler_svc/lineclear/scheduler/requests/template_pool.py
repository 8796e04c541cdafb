"""Render chat templates in child processes, which are killed when a template takes too long."""

from __future__ import annotations

from lineclear.scheduler.requests.limited_processes import LimitedProcesses, ProcessKilled, Work
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.chat_template import ChatTemplate
from lineclear.scheduler.text.limited_child import ANSWERED
from lineclear.scheduler.text.template_renderer import not_taken

_EXPANSION = 8  # largest rendered conversation, as a multiple of max_prompt_bytes


class TemplatePool(LimitedProcesses):
    """Renders conversations in child processes, one at a time in each. On one event loop."""

    def __init__(self, template: ChatTemplate, settings: SchedulerSettings) -> None:
        seconds, most = settings.max_chat_template_seconds, _EXPANSION * settings.max_prompt_bytes + 65536
        module, what = "lineclear.scheduler.text.template_process", "conversations are or wait to be rendered"
        definition = template.definition(cpu_seconds=seconds, max_bytes=most)
        super().__init__(Work("chat template", module, definition, seconds, most + 1024, settings.max_queue_size, what))
        self._cpu_seconds = seconds

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
