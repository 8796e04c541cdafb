"""Settings of a process: one frozen object, made at start from flags, environment and configuration file.

A flag beats an environment variable, which beats the file named by --config, which beats the default. Error sentences
name a setting by its flag; `Sources.named` replaces the flag by the variable or the line of the file that set it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import AliasChoices, AliasGenerator, PrivateAttr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from . import command_line, settings_help
from .command_line import FlagValue, Hints
from .flag_aliases import names_of
from .setting_fields import allowed, flag_of

Settings = TypeVar("Settings", bound="ProcessSettings")
Part = TypeVar("Part")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")


class ConfigurationError(Exception):
    """The process cannot start as configured; the message says what to change. Exit code 78."""


class ProcessSettings(BaseSettings):
    """Base of the settings of both processes."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix_target="all",
        use_attribute_docstrings=True,
        alias_generator=AliasGenerator(validation_alias=lambda name: AliasChoices(*names_of(name))),
    )

    program: ClassVar[str]
    _sources: Sources | None = PrivateAttr(None)

    def part(self, kind: Callable[..., Part]) -> Part:
        """Return the dataclass `kind` with the values of the settings and properties that have its fields' names."""
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: getattr(self, name) for name in names if hasattr(self, name)})

    def named(self, sentence: str) -> str:
        """Return the sentence with each flag replaced by the flag, variable or line of the file that set it."""
        return self._sources.named(sentence) if self._sources else sentence


def load(kind: type[Settings], words: Sequence[str], hints: Hints | None = None) -> Settings:
    """Return the settings from flags, environment and, if `kind` has a setting `config`, the TOML file that it names.

    Raises ConfigurationError with one line for each thing that is wrong; SystemExit(0) after --help and --version.
    """
    prefix = kind.model_config.get("env_prefix", "")
    settings_help.answer(kind, words, program=kind.program, prefix=prefix)
    flags, errors = command_line.parse(kind, words, hints)
    if errors:
        raise ConfigurationError("\n".join(errors))
    file = _config_file(flags, prefix) if "config" in kind.model_fields else ""
    sources = Sources(kind, flags, os.environ, file, _read(file) if file else {})
    try:
        settings = kind(**sources.arguments())
    except ValidationError as error:
        raise ConfigurationError("\n".join(map(sources.problem, error.errors()))) from None
    settings._sources = sources
    return settings


def _config_file(flags: Mapping[str, FlagValue], prefix: str) -> str:
    if flag := flags.get("config"):
        return str(flag.value)
    return next((value for name, value in os.environ.items() if name.upper() == f"{prefix}CONFIG"), "")


def _read(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"config file {path}: {error}") from None


class Source(NamedTuple):
    """Where the value of a setting comes from."""

    label: str
    """The flag, the variable, or the key and its file."""
    given: str
    """The same with the value, as typed."""


class Sources:
    """Where the value of each setting comes from."""

    def __init__(
        self,
        kind: type[BaseSettings],
        flags: Mapping[str, FlagValue],
        environment: Mapping[str, str],
        file: str = "",
        entries: Mapping[str, Any] | None = None,
    ) -> None:
        self._fields = kind.model_fields
        self._prefix = kind.model_config.get("env_prefix", "")
        self._flags = flags
        self._file = file
        self._entries = entries or {}
        self._environment = environment
        self._variables = {name.upper(): name for name in environment}
        self._settings = {name: setting for setting in self._fields for name in names_of(setting)}

    def arguments(self) -> dict[str, Any]:
        """Return flags and entries of the file for the constructor, which reads the environment itself."""
        entries = {key: value for key, value in self._entries.items() if not self._beaten(self._settings.get(key, key))}
        return entries | {name: flag.value for name, flag in self._flags.items()}

    def named(self, sentence: str) -> str:
        """Return the sentence with each flag replaced by what set it."""
        return _FLAG.sub(lambda match: self._label(match[0], match[1].replace("-", "_")), sentence)

    def of(self, name: str) -> Source:
        """Return the source whose value counts."""
        if flag := self._flags.get(name):
            return Source(flag.flag, flag.text)
        if variable := self._variable(name):
            return Source(variable, f"{variable}={shlex.quote(self._environment[variable])}")
        for key in names_of(name):
            if key in self._entries:
                value = json.dumps(self._entries[key], ensure_ascii=False, default=str)
                return Source(f"{key} in {self._file}", f"{key} = {value} in {self._file}")
        return Source(flag_of(name), flag_of(name))

    def problem(self, error: Mapping[str, Any]) -> str:
        message = self.named(str(error["msg"]).removeprefix("Value error, "))
        if not error["loc"]:
            return message
        given = str(error["loc"][0])
        name = self._settings.get(given)
        if name is None:
            near = difflib.get_close_matches(given, self._settings, n=1, cutoff=0.8)
            return f"{self._file}: there is no setting {given}" + (f"; is it {near[0]}?" if near else "")
        if error["type"] == "missing":
            return f"{flag_of(name)} is missing, and so is {self._prefix}{name.upper()} in the environment"
        source = self.of(name)
        if error["type"] == "value_error":
            return f"{source.given}: {message}"
        return f"{source.given} is not {allowed(self._fields[name])}"

    def _beaten(self, name: str) -> bool:
        return name in self._flags or bool(self._variable(name))

    def _variable(self, name: str) -> str | None:
        names = (f"{self._prefix}{name}".upper() for name in names_of(name))
        return next((self._variables[name] for name in names if name in self._variables), None)

    def _label(self, flag: str, name: str) -> str:
        return self.of(name).label if name in self._fields else flag
