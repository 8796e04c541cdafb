"""Bearer tokens from a file: which are valid and whose they are. Decides nothing about what a tenant may do.

A line is a name and a token, or a name and `sha256:` with the hash of one. A name may stand on several lines: so a new
token is handed out while the old one still works. Lines that begin with # are for people.
"""

from __future__ import annotations

import hmac
import re
import stat
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from lineclear.process.settings_base import ConfigurationError

_MAX_FILE_BYTES = 1024 * 1024
_MIN_TOKEN_CHARACTERS = 16
_MAX_TOKEN_CHARACTERS = 4096
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, repr=False)
class TokenTable:
    """Names and hashes of tokens. Its repr shows neither."""

    entries: tuple[tuple[str, bytes], ...]

    def name_of(self, token: str) -> str | None:
        """Whose token this is; None if it is nobody's. Takes the same time whichever entry fits, or none."""
        if len(token) > _MAX_TOKEN_CHARACTERS:
            return None
        given = sha256(token.encode("utf-8", "replace")).digest()
        found = None
        for name, known in self.entries:
            if hmac.compare_digest(given, known):
                found = name
        return found


def read_tokens(path: Path) -> TokenTable:
    """The tokens in a file. Raises ConfigurationError, which names the line and never what is in it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"token file {path}: {error.strerror}") from None
    if mode & 0o007:
        raise ConfigurationError(f"token file {path} has mode {mode:04o}: others may open it; run: chmod 0400 {path}")
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigurationError(f"token file {path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(f"token file {path} holds something other than ASCII") from None
    entries = [_entry(path, number, line) for number, line in enumerate(lines, 1) if _says_something(line)]
    if not entries:
        raise ConfigurationError(f"token file {path} holds no token; a line is a name and a token")
    return TokenTable(tuple(entries))


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _entry(path: Path, number: int, line: str) -> tuple[str, bytes]:
    where = f"token file {path}, line {number}"
    words = line.split()
    if len(words) != 2:
        raise ConfigurationError(f"{where}: a line is a name and a token, with a space between")
    name, token = words
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{where}: a name is at most 128 of A-Z a-z 0-9 . _ : @ / -")
    if token.startswith("sha256:"):
        found = _HASH.fullmatch(token)
        if found is None:
            raise ConfigurationError(f"{where}: after sha256: come 64 lower-case hexadecimal digits")
        return name, bytes.fromhex(found[1])
    if not _MIN_TOKEN_CHARACTERS <= len(token) <= _MAX_TOKEN_CHARACTERS:
        raise ConfigurationError(
            f"{where}: a token has {_MIN_TOKEN_CHARACTERS} to {_MAX_TOKEN_CHARACTERS} characters; "
            "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return name, sha256(token.encode()).digest()
