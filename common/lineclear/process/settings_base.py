"""The settings of a process: their groups, where each came from, what is wrong with one, and --help.

A process declares its settings as fields of a pydantic model, each within a `Group`. Error sentences name a setting by
its flag; `Sources.named` puts the environment variable or the line of the file in its place where that was given.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

WIDTH: Final = 100
_COLUMN = 34
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")


class Group(NamedTuple):
    """A topic of --help and of the reference page. Every setting is declared by one."""

    title: str

    def field(self, default: Any = ..., *, description: str, brief: str = "", **bounds: Any) -> Any:
        """Declare a setting. `brief` is its line in --help; by default the first sentence of the description."""
        line = brief or re.split(r"(?<=\.)\s", description)[0]
        return Field(default, description=description, json_schema_extra={"group": self.title, "brief": line}, **bounds)


class Source(NamedTuple):
    """A setting as it was given."""

    label: str
    """How to name it: the flag, the variable, or the key and its file."""
    given: str
    """It with its value, as typed."""


class Sources:
    """Which setting came from which flag, variable or line of a file."""

    def __init__(
        self,
        kind: type[BaseSettings],
        words: Sequence[str],
        environment: Mapping[str, str],
        file: str = "",
        entries: Mapping[str, Any] | None = None,
    ) -> None:
        self._fields = kind.model_fields
        self._prefix = kind.model_config.get("env_prefix", "")
        self._words = words
        self._file = file
        self._entries = entries or {}
        self._variables = {name.upper(): name for name in environment}
        self._environment = environment

    def named(self, sentence: str) -> str:
        """Return the sentence with each flag replaced by what stood in its place."""
        return _FLAG.sub(lambda match: self._label(match[0], match[1].replace("-", "_")), sentence)

    def of(self, name: str) -> Source:
        """Return the source that counts: a flag beats a variable, which beats the file, which beats the default."""
        if (typed := self._typed(name)) is not None:
            return typed
        if (variable := self._variables.get(f"{self._prefix}{name}".upper())) is not None:
            return Source(variable, f"{variable}={shlex.quote(self._environment[variable])}")
        if name in self._entries:
            value = json.dumps(self._entries[name], ensure_ascii=False, default=str)
            return Source(f"{name} in {self._file}", f"{name} = {value} in {self._file}")
        return Source(flag_of(name), flag_of(name))

    def problem(self, error: Mapping[str, Any]) -> str:
        """Return the sentence for one thing that pydantic found."""
        name = str(error["loc"][0]) if error["loc"] else ""
        message = self.named(str(error["msg"]).removeprefix("Value error, "))
        if not name:
            return message
        if error["type"] == "missing":
            return f"{flag_of(name)} is missing, and so is {self._prefix}{name.upper()} in the environment"
        if name not in self._fields:
            near = difflib.get_close_matches(name, self._fields, n=1, cutoff=0.8)
            return f"{self._file}: there is no setting {name}" + (f"; is it {near[0]}?" if near else "")
        source = self.of(name)
        if error["type"] == "value_error":
            return f"{source.given}: {message}"
        return f"{source.given} is not {allowed(self._fields[name])}"

    def unreadable(self, said: str) -> str | None:
        """Return the sentence for a value that pydantic-settings or argparse could not read; None if it is another."""
        said = said.removeprefix("error parsing CLI: ")
        if found := re.match(r"argument (--[a-z0-9-]+)\S*: (.*)", said):
            name = found[1].removeprefix("--").replace("-", "_")
            if found[2].startswith("ignored explicit argument"):
                return f"{self.of(name).given}: {found[1]} takes no value; write {found[1]} or --no-{found[1][2:]}"
            if found[2].startswith("expected"):
                return f"{found[1]} has no value; give {allowed(self._fields[name])}"
            return f"{found[1]}: {found[2]}"
        if (found := re.search(r'\bfor (?:field )?"?(\w+)"?', said)) and found[1] in self._fields:
            return f"{self.of(found[1]).given} is not {allowed(self._fields[found[1]])}"
        return None

    def _label(self, flag: str, name: str) -> str:
        return self.of(name).label if name in self._fields else flag

    def _typed(self, name: str) -> Source | None:
        flag, found = flag_of(name), None
        is_switch = self._fields[name].annotation is bool
        for index, word in enumerate(self._words):
            head, equals, _ = word.partition("=")
            if head != flag and not (is_switch and head == f"--no-{flag[2:]}"):
                continue
            takes_next = not equals and not is_switch and index + 1 < len(self._words)
            value = f" {shlex.quote(self._words[index + 1])}" if takes_next else ""
            found = Source(head, f"{word}{value}")
        return found


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def allowed(field: FieldInfo) -> str:
    """Return what a setting may be, to follow "is not"."""
    if field.annotation is bool:
        return "true or false"
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(get_args(field.annotation))}"
    if get_origin(field.annotation) is tuple:
        return 'a list of words; in the environment and the file, write ["python", "-m", "module"]'
    bounds = {type(rule).__name__: rule for rule in field.metadata}
    if field.annotation is str:
        return "a text that is not empty" if "MinLen" in bounds else "a text"
    kind = "a whole number" if field.annotation is int else "a number"
    least, most = bounds.get("Ge"), bounds.get("Le")
    above, below = bounds.get("Gt"), bounds.get("Lt")
    lower = f"from {least.ge:.15g}" if least else f"above {above.gt:.15g}" if above else ""
    upper = f"to {most.le:.15g}" if most else f"to below {below.lt:.15g}" if below else ""
    if above and most:
        upper = f"and at most {most.le:.15g}"
    return " ".join(part for part in (kind, lower, upper) if part)


# --- help ------------------------------------------------------------------------------------------------------------


def groups(kind: type[BaseSettings]) -> dict[str, dict[str, FieldInfo]]:
    """Return the settings by group, in the order in which groups are first used."""
    found: dict[str, dict[str, FieldInfo]] = {}
    for name, field in kind.model_fields.items():
        found.setdefault(_extra(field)["group"], {})[name] = field
    return found


def name_flags(kind: type[BaseSettings], text: str) -> str:
    """Return the text with the names of settings that have an underscore replaced by their flags."""
    return re.sub(
        r"\b[a-z]+(_[a-z]+)+\b", lambda word: flag_of(word[0]) if word[0] in kind.model_fields else word[0], text
    )


def answer_help(kind: type[BaseSettings], words: Sequence[str]) -> None:
    """Print the help and raise SystemExit(0) where the words ask for it: -h, --help, --help=SETTING."""
    for word in words:
        head, _, name = word.partition("=")
        if word == "-h" or head == "--help":
            print("\n".join(_about(kind, name) if name else _help(kind)))
            raise SystemExit(0)


def _help(kind: type[BaseSettings]) -> Iterator[str]:
    program, prefix = kind.model_config.get("cli_prog_name"), kind.model_config.get("env_prefix", "")
    paragraphs = " ".join((kind.__doc__ or "").split())
    yield f"usage: {program} [--SETTING VALUE ...]"
    yield ""
    yield from _wrapped(paragraphs)
    yield ""
    yield from _wrapped(
        f"The value in [] is the default. Each setting is also a variable in the environment: {prefix} and the name in"
        " capitals. --help=SETTING says all about one."
    )
    for title, fields in groups(kind).items():
        yield from ("", f"{title}:")
        for name, field in fields.items():
            yield _line(kind, name, field)
    yield from ("", "Other:", _in_columns("-h, --help", "Show this"), _in_columns("--version", "Show the version"))


def _line(kind: type[BaseSettings], name: str, field: FieldInfo) -> str:
    default = f" [{_default(field)}]" if _default(field) else ""
    meaning = name_flags(kind, _extra(field)["brief"]).removesuffix(".")
    line = _in_columns(_usage(name, field), f"{meaning}{default}")
    if get_origin(field.annotation) is Literal:
        longer = _in_columns(_usage(name, field), f"{meaning}: {', '.join(get_args(field.annotation))}{default}")
        return longer if len(longer) <= WIDTH else line
    return line


def _in_columns(usage: str, meaning: str) -> str:
    return f"  {usage:{_COLUMN}} {meaning}"


def _about(kind: type[BaseSettings], name: str) -> Iterator[str]:
    name = name.removeprefix("--").replace("-", "_")
    field = kind.model_fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        yield f"there is no setting {flag_of(name)}" + (f"; is it {flag_of(near[0])}?" if near else "")
        return
    yield _usage(name, field)
    yield from (f"  {line}" for line in _wrapped(name_flags(kind, field.description or ""), WIDTH - 2))
    yield from (f"  {line}" for line in _wrapped(f"Allowed: {allowed(field)}.", WIDTH - 2))
    yield f"  Default: {'required' if field.is_required() else _default(field) or 'empty'}."
    yield f"  In the environment: {kind.model_config.get('env_prefix', '')}{name.upper()}."


def _usage(name: str, field: FieldInfo) -> str:
    if field.annotation is bool:
        return f"--[no-]{name.replace('_', '-')}"
    return f"{flag_of(name)} {_word(name, field)}"


def _word(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "NAME"
    if field.annotation in (int, float):
        return "S" if name.endswith("_seconds") else "MS" if name.endswith("_ms") else "N"
    for ending, word in _WORDS.items():
        if name.endswith(ending):
            return word
    return "TEXT"


_WORDS = {"_file": "FILE", "config": "FILE", "directory": "DIR", "model": "DIR", "listen": "ADDRESS", "name": "NAME"}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value in ("", ()):
        return ""
    return (
        ("on" if value else "off")
        if isinstance(value, bool)
        else f"{value:.15g}"
        if isinstance(value, float)
        else str(value)
    )


def _extra(field: FieldInfo) -> dict[str, str]:
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "a setting is declared by a Group"
    return {key: str(value) for key, value in extra.items()}


def _wrapped(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
