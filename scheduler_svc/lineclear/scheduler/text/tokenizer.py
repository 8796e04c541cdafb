"""Encode text with the model's tokenizer, and return the bytes of each token.

Reads tokenizer.json and tokenizer_config.json of a model directory; the `tokenizers` library does the work. Special
tokens come from the chat template and the post-processor only: written in a caller's text they are plain text.

The loaded copy of the tokenizer has a random private name for every special token, so no caller's text contains one.
`seal` replaces the special tokens of a rendered template by these names. The library splits a sealed text at special
tokens exactly as it would split the original, so the ids are the same.

The library's own switch, `encode_special_tokens`, does not suffice. It holds for the whole tokenizer, while a rendered
conversation has special tokens of the template beside text of the caller. And unigram and word-level models still find
special tokens in their own vocabulary.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import secrets
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

# The thread pool of the library does not pay for one input, and warns after every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer as LibraryTokenizer

from lineclear.model_files import directory_check
from lineclear.model_files.special_tokens import mark_special, special_names
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.text.special_token_seal import Seal

REPLACE_EACH = "lineclear.replace_each"
"""Error handler: one U+FFFD for each bad byte, as byte-fallback decoders do (`replace` gives one for each sequence)."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH, _replace_each)


class Tokenizer:
    """Encode text and return the bytes of tokens. Thread-safe.

    The text of several tokens is the concatenation of their bytes, decoded as UTF-8.
    """

    def __init__(self, definition: dict[str, Any], named_special: frozenset[str] = frozenset()) -> None:
        """`definition` is a parsed tokenizer.json, changed in place; `named_special` are further special tokens.

        Raises ConfigurationError if the tokenizer's text cannot be decoded token by token.
        """
        nonce = secrets.token_hex(16)
        mark_special(definition, named_special)
        self._private = _rename_special(definition, lambda i: f"\U000f0000{nonce}:{i}\U000f0001")
        try:
            self._library = LibraryTokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the library raises Exception itself
            raise ConfigurationError(f"tokenizer.json cannot be used: {error}") from None
        self._library.no_truncation()
        self._library.no_padding()
        ids = {content: self._library.token_to_id(private) for content, private in self._private.items()}
        self._special = {i: content for content, i in ids.items() if i is not None}
        if len(self._special) != len(ids):
            raise ConfigurationError("tokenizer.json: special tokens share an id, or have none")
        self.seal = Seal({content: self._private[content] for content in self._special.values()})
        """Replaces special tokens by their private names; for template text only."""
        self._byte_piece, self.errors = _decoder_kind(definition.get("decoder"))
        """`errors` is the name of the codecs error handler for bytes that are not UTF-8."""
        self.known: dict[bool, dict[int, str]] = {True: {}, False: {}}
        """Cache, by `keep_special`: texts of tokens that are whole characters. IncrementalDecoder fills it."""
        self._first: dict[int, bytes | None] = {}
        self._rest: dict[int, bytes | None] = {}

    @property
    def vocab_size(self) -> int:
        """The largest id plus one. The model's vocabulary may be larger."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_byte_tokens(self) -> bool:
        """Whether the text of an answer is the bytes of its tokens, as structured output needs."""
        return self._byte_piece in (_byte_level_piece, _byte_fallback_piece)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the tokens of the post-processor (mostly a beginning-of-sequence token)."""
        return self._encode(text, add_special_tokens=True)

    def encode_sealed(self, text: str) -> list[int]:
        """Return the ids of a sealed text. The post-processor adds nothing."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # `encode` would hold the interpreter lock for its whole duration.
        ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def is_special(self, token_id: int) -> bool:
        """Whether a text omits the token unless special tokens are kept."""
        return token_id in self._special

    def special_ids(self, contents: Set[str]) -> dict[int, str]:
        return {i: content for i, content in self._special.items() if content in contents}

    def token_ids(self, contents: Set[str]) -> dict[str, int]:
        """Return the ids of the texts among `contents` that are one token, special or not."""
        special = {content: i for i, content in self._special.items()}
        found = {content: special.get(content, self._library.token_to_id(content)) for content in contents}
        return {content: i for content, i in found.items() if i is not None}

    def piece(self, token_id: int, *, first: bool) -> bytes | None:
        """Return the bytes of a token, which may differ for the `first` of a text; None for an unknown id."""
        pieces = self._first if first else self._rest
        try:
            return pieces[token_id]
        except KeyError:
            piece = self._make_piece(token_id, first)
            pieces[token_id] = piece
            return piece

    def token_texts(self) -> list[str]:
        """Return the text of each token within a text; empty for special tokens. Takes up to a second."""
        pieces = (None if i in self._special else self._make_piece(i, False) for i in range(self.vocab_size))
        return ["" if piece is None else piece.decode("utf-8", "replace") for piece in pieces]

    def _make_piece(self, token_id: int, first: bool) -> bytes | None:
        token = self._special.get(token_id) or self._library.id_to_token(token_id)
        if token is None:
            return None
        found = self._byte_piece(token)
        if found is not None:
            return found if found != b" " or not first else self._text_piece(" ", first)
        return self._text_piece(token, first)

    def _text_piece(self, token: str, first: bool) -> bytes:
        decoder = self._library.decoder
        if first:
            return (decoder.decode([token]) if decoder is not None else token).encode()
        if decoder is None:
            return (" " + token).encode()
        text: str = decoder.decode([_ANCHOR, token])
        assert text.startswith(_ANCHOR), "a decoder that changes the token before"
        return text[len(_ANCHOR) :].encode()


def load_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a model directory. Raises ConfigurationError with the reason."""
    definition = read_json(model / "tokenizer.json")
    if definition is None:
        raise ConfigurationError(f"{model} {directory_check.of_tokenizer(model)}")
    return Tokenizer(definition, special_names(read_json(model / "tokenizer_config.json") or {}))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of the model, None if the file is missing. Raises ConfigurationError."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path} is nested too deeply to be read") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} does not contain a JSON object")
    return found


def _rename_special(definition: dict[str, Any], private_name: Callable[[int], str]) -> dict[str, str]:
    """Rename every special token in a tokenizer.json, in place. Return the private names by the original ones."""
    private: dict[str, str] = {}
    for index, token in enumerate(definition["added_tokens"]):
        if token["special"]:
            # With `normalized` the library searches for the token as the normalizer changes it, and misses most.
            token["normalized"] = False
            token["content"] = private.setdefault(token["content"], private_name(index))
    model = definition.get("model")
    model = model if isinstance(model, dict) else {}
    vocab = model.get("vocab")
    # Rename in the vocabulary too: unigram and word-level models would find the original there.
    if isinstance(vocab, dict):
        model["vocab"] = {private.get(piece, piece): i for piece, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[private.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = private.get(model["unk_token"], model["unk_token"])
    return private


def _decoder_kind(decoder: Any) -> tuple[Callable[[str], bytes | None], str]:
    """Return the function from token to bytes, and the error handler that decodes like the model's decoder.

    Raises ConfigurationError for a decoder under which the text of a token depends on its neighbours.
    """
    if decoder is None:
        return lambda token: None, "replace"
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds and set(kinds) <= {"ByteLevel", "Fuse"} and kinds[0] == "ByteLevel":
        return _byte_level_piece, "replace"
    fused = False
    for step, kind in zip(steps, kinds, strict=True):
        before_fuse = kind in ("Metaspace", "WordPiece", "ByteFallback", "Replace")
        strips_start = kind == "Strip" and step.get("stop", 0) == 0
        if not (kind == "Fuse" or strips_start or (before_fuse and not fused)):
            raise ConfigurationError(f"tokenizer.json: texts of a {kind} decoder here cannot be decoded token by token")
        fused = fused or kind == "Fuse"
    if "ByteFallback" in kinds:
        return _byte_fallback_piece, REPLACE_EACH
    return lambda token: None, "replace"


def _byte_fallback_piece(token: str) -> bytes | None:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for the 256 bytes: the byte itself if printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - printable))})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:  # an added token written in plain characters
        return token.encode()
