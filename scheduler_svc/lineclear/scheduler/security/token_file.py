"""Bearer tokens from a file: names and tokens, or names and hashes of tokens.

A line is a name and a token, or a name and `sha256:` with a hash. A name may have several lines, so that a new token
works beside the old one. Lines that start with # are comments.
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
    """Names and hashes of tokens. The repr shows neither."""

    entries: tuple[tuple[str, bytes], ...]

    def name_of(self, token: str) -> str | None:
        """Return the name of a token, or None. Takes the same time for every entry, and without a match."""
        if len(token) > _MAX_TOKEN_CHARACTERS:
            return None
        given = sha256(token.encode("utf-8", "replace")).digest()
        found = None
        for name, known in self.entries:
            if hmac.compare_digest(given, known):
                found = name
        return found


def read_tokens(path: Path) -> TokenTable:
    """Read a token file. Raises ConfigurationError with the line number, never with its content."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"token file {path}: {error.strerror}") from None
    if mode & 0o007:
        raise ConfigurationError(f"token file {path} has mode {mode:04o}: others can read it; run: chmod 0400 {path}")
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigurationError(f"token file {path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(f"token file {path} contains non-ASCII bytes") from None
    entries = [_entry(path, number, line) for number, line in enumerate(lines, 1) if line.strip()[:1] not in ("", "#")]
    if not entries:
        raise ConfigurationError(f"token file {path} contains no token; write a name and a token on each line")
    return TokenTable(tuple(entries))


def _entry(path: Path, number: int, line: str) -> tuple[str, bytes]:
    where = f"token file {path}, line {number}"
    words = line.split()
    if len(words) != 2:
        raise ConfigurationError(f"{where}: expected a name and a token, separated by a space")
    name, token = words
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{where}: a name is at most 128 of A-Z a-z 0-9 . _ : @ / -")
    if token.startswith("sha256:"):
        found = _HASH.fullmatch(token)
        if found is None:
            raise ConfigurationError(f"{where}: expected 64 lower-case hexadecimal digits after sha256:")
        return name, bytes.fromhex(found[1])
    if not _MIN_TOKEN_CHARACTERS <= len(token) <= _MAX_TOKEN_CHARACTERS:
        raise ConfigurationError(
            f"{where}: a token has {_MIN_TOKEN_CHARACTERS} to {_MAX_TOKEN_CHARACTERS} characters; "
            "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return name, sha256(token.encode()).digest()
