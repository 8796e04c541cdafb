"""A command on a terminal of a given size: a real pty, and what it shows."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any, Self

from client.command import COMMAND
from support.engine_harness import ENVIRONMENT
from support.time_limits import PATIENCE_SECONDS

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
FULL_SCREEN, NORMAL_SCREEN, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
HOME = "\x1b[H"


class Terminal:
    """A running command. `text` is all that it wrote."""

    def __init__(self, *arguments: str, columns: int = 100, rows: int = 30) -> None:
        self._ours, theirs = pty.openpty()
        self._resize(columns, rows)
        self._attributes = termios.tcgetattr(self._ours)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
        environment = {**os.environ, **ENVIRONMENT, "TERM": "xterm-256color"}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits SIG_IGN, not a handler
        try:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
            )
        finally:
            signal.signal(signal.SIGINT, before)
            os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a user does with the window. Forgets what was written before."""
        self.text = ""
        self._resize(columns, rows)
        self.process.send_signal(signal.SIGWINCH)

    def screen(self) -> list[str]:
        frames = self.text.split(HOME)
        frame = frames[-2] if len(frames) > 2 else frames[-1]
        return [line.rstrip() for line in ESCAPES.sub("", frame).split("\n")]

    def read_until(self, condition: Callable[[list[str]], Any]) -> list[str]:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition(screen := self.screen()):
            assert time.monotonic() < until, "\n".join(screen)
            assert self._read(), f"the command ended: {self.text[-2000:]}"
        return screen

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENCE_SECONDS)

    @property
    def is_restored(self) -> bool:
        """Whether the terminal has its own screen, its cursor and its settings again."""
        last = max(self.text.rfind(mark) for mark in (FULL_SCREEN, NORMAL_SCREEN))
        same = termios.tcgetattr(self._ours) == self._attributes
        return same and last == self.text.rfind(NORMAL_SCREEN) and self.text.rfind(SHOW_CURSOR) > 0

    def _read(self) -> bool:
        """Read what is there, for up to a second. Return False after the end of the command."""
        if not select.select([self._ours], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # Linux: no process has the terminal any more
            return False
        self.text += self._decoder.decode(data)
        return bool(data)
