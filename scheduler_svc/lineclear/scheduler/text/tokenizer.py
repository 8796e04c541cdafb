"""The model's tokenizer: text to token ids, and what each id contributes to a text.

Reads tokenizer.json and tokenizer_config.json of a model directory; the `tokenizers` library does the work. Decides
that special tokens come from the chat template and the post-processor only: written in a text they are plain text.
Incremental decoding and stop strings are in `text`, conversations in `chat`.

How special tokens are kept out of texts: the copy of the tokenizer that is loaded knows every special token under a
private name that nobody outside can guess. Whatever a caller writes, there is no special token in it; whoever is
allowed to write one (`seal`) writes its private name. The library splits a sealed text at special tokens exactly as it
would have split the original, so ids are the same.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# One input is never worth a pool of threads, and the pool warns after every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer as LibraryTokenizer

from lineclear.scheduler.model_dir import read_json
from lineclear.scheduler.settings import ConfigurationError
from lineclear.scheduler.text.detokenizer import REPLACE_EACH
from lineclear.scheduler.text.special_token_seal import Seal

_SPECIAL_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"


class Tokenizer:
    """Encodes, and knows every token's piece of text (`detokenizer.Pieces`). Safe from any thread."""

    def __init__(self, definition: dict[str, Any], named_special: frozenset[str] = frozenset()) -> None:
        """`definition` is a parsed tokenizer.json, which is changed; `named_special` are special besides those it says.

        Raises ConfigurationError for a tokenizer whose texts cannot be made piece by piece.
        """
        nonce = secrets.token_hex(16)
        self._private = _rename_special(definition, named_special, lambda i: f"\U000f0000{nonce}:{i}\U000f0001")
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
        self._sealing = Seal({content: self._private[content] for content in self._special.values()})
        self._byte_piece, self.errors = _decoder_kind(definition.get("decoder"))
        self.known: dict[bool, dict[int, str]] = {True: {}, False: {}}
        self._first: dict[int, bytes | None] = {}
        self._rest: dict[int, bytes | None] = {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's own vocabulary may be larger."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Every special token, as its model writes it."""
        return self._sealing.special_tokens

    # --- text to ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with what the model's post-processor adds (a beginning-of-sequence token, mostly)."""
        return self._encode(text, add_special_tokens=True)

    def encode_sealed(self, text: str) -> list[int]:
        """The ids of a text whose special tokens were written by `seal`, and of nothing else."""
        return self._encode(text, add_special_tokens=False)

    def seal(self, text: str) -> str:
        """`text` with the special tokens written in it made real. For text of the model's author, not of callers."""
        return self._sealing.seal(text)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Not `encode`: that one keeps the interpreter lock for as long as it takes.
        ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    # --- ids to text (text.Pieces) -----------------------------------------------------------------------------------

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def piece(self, token_id: int, *, first: bool) -> bytes | None:
        pieces = self._first if first else self._rest
        try:
            return pieces[token_id]
        except KeyError:
            piece = self._make_piece(token_id, first)
            pieces[token_id] = piece
            return piece

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
    """The tokenizer of a model directory. Raises ConfigurationError with the reason."""
    path = model / "tokenizer.json"
    definition = read_json(path)
    if definition is None:
        raise ConfigurationError(f"{path} does not exist; lineclear needs the tokenizer in this format")
    return Tokenizer(definition, _named_special(read_json(model / "tokenizer_config.json") or {}))


# --- special tokens --------------------------------------------------------------------------------------------------


def token_text(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, where it is a string or an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) and content else None


def _named_special(config: Mapping[str, Any]) -> frozenset[str]:
    """Tokens that tokenizer_config.json calls special; transformers treats these so whatever tokenizer.json says."""
    found: list[Any] = []
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        found.extend(value.values() if name == "extra_special_tokens" and isinstance(value, Mapping) else ())
        found.extend(value if isinstance(value, list) else [value])
    added = config.get("added_tokens_decoder")
    for token in added.values() if isinstance(added, Mapping) else ():
        if isinstance(token, Mapping) and token.get("special"):
            found.append(token)
    return frozenset(text for text in map(token_text, found) if text is not None)


def _rename_special(
    definition: dict[str, Any], named_special: frozenset[str], private_name: Callable[[int], str]
) -> dict[str, str]:
    """Give every special token in a tokenizer.json a private name, in place; returns private names by real ones."""
    model = definition.get("model")
    model = model if isinstance(model, dict) else {}
    vocab = model.get("vocab")
    added = definition.setdefault("added_tokens", [])
    present = {token["content"] for token in added}
    in_model = {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab or {}
    for content in sorted(named_special - present):
        if content in in_model:  # what is in neither has no id, and cannot be written by anybody
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": in_model[content], "content": content, "special": True, **flags})
    private: dict[str, str] = {}
    for index, token in enumerate(added):
        if token.get("special") or token["content"] in named_special:
            # `normalized` would have the library look for it with the normalizer's additions, and miss most of them.
            token["special"], token["normalized"] = True, False
            token["content"] = private.setdefault(token["content"], private_name(index))
    # Also in the model's vocabulary: a unigram model, or one that takes whole words, would find it there.
    if isinstance(vocab, dict):
        model["vocab"] = {private.get(piece, piece): i for piece, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[private.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = private.get(model["unk_token"], model["unk_token"])
    return private


# --- decoders --------------------------------------------------------------------------------------------------------


def _decoder_kind(decoder: Any) -> tuple[Callable[[str], bytes | None], str]:
    """How tokens become bytes, and the error handler that decodes those as the model's decoder would.

    Raises ConfigurationError for a decoder under which a token's text depends on more than being the first.
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
            raise ConfigurationError(f"tokenizer.json: texts of a {kind} decoder here cannot be made piece by piece")
        fused = fused or kind == "Fuse"
    if "ByteFallback" in kinds:
        return _byte_fallback_piece, REPLACE_EACH
    return lambda token: None, "replace"


def _byte_fallback_piece(token: str) -> bytes | None:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: a byte that is printable itself, else one from 256 upwards."""
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
