"""Ids and texts equal those of the tokenizers library; special tokens in a caller's text are plain text."""

from __future__ import annotations

import json
import re
import threading
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.small_tokenizers import KINDS, SPECIAL, byte_fallback, byte_level, definition, save
from tokenizers import Tokenizer as Library
from tokenizers import decoders

from lineclear.model_files.token_table import token_table
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "The quick brown fox",
    " two  spaces  ",
    "Zwölf Boxkämpfer 😀 いろは\n\n\ttab",
    "user<think>assistant</think>",
    "a",
    "日本語 \U0001f469\u200d\U0001f680",
]


@cache
def both(kind: str) -> tuple[Library, Tokenizer]:
    library = KINDS[kind]()
    return library, Tokenizer(definition(library))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_librarys(kind: str, text: str) -> None:
    library, ours = both(kind)
    assert ours.encode(text) == library.encode(text).ids


def test_padding_and_truncation_of_the_file_are_not_used() -> None:
    """They are settings of a training run."""
    library = KINDS["byte_level"]()
    wanted = library.encode("The quick brown fox").ids
    library.enable_padding(length=64)
    library.enable_truncation(2)
    assert Tokenizer(definition(library)).encode("The quick brown fox") == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["<s>a</s>", "<|im_start|>user\nHi<|im_end|>", "[INST] x [/INST]", "a <s>  b", "<unk>"]
)
def test_sealed_text_encodes_special_tokens(kind: str, text: str) -> None:
    library, ours = both(kind)
    assert ours.encode_sealed(ours.seal(text)) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", SPECIAL)
def test_special_token_in_a_text_is_plain_text(kind: str, special: str) -> None:
    library, ours = both(kind)
    for text in (special, f"a {special} b", special * 3, f"x{special}"):
        ids = ours.encode_sealed(text)
        unknown = library.token_to_id("<unk>")
        assert not [i for i in ids if ours.is_special(i) and i != unknown]
        if kind in ("byte_level", "byte_fallback", "gemma_like", "metaspace_first"):
            assert decode(ours, ids, keep_special=True) == text  # no character is lost


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([*SPECIAL, "<|late|>", "<", "|", ">", "im_", "a", " ", "\n", "é"]), max_size=8))
def test_generated_texts_give_no_special_token(parts: list[str]) -> None:
    for kind in ("byte_level", "unigram", "byte_fallback"):
        library, ours = both(kind)
        unknown = library.token_to_id("<unk>")
        assert not [i for i in ours.encode_sealed("".join(parts)) if ours.is_special(i) and i != unknown]


def test_plain_text_equals_encode_special_tokens() -> None:
    """For a BPE model, whose merges never produce a special token, the library's switch gives the same ids."""
    library, ours = byte_level(), Tokenizer(definition(byte_level()))
    library.encode_special_tokens = True
    text = "Hello <|im_start|>user </s> [INST]<|late|>  x"
    assert ours.encode(text) == library.encode(text).ids


def test_post_processor_adds_bos_to_prompts_only() -> None:
    _, ours = both("byte_level")
    assert ours.encode("a")[0] == 0
    assert ours.encode_sealed("a")[0] != 0
    assert ours.encode("<s>a").count(0) == 1


def test_configuration_names_special_tokens(tmp_path: Path) -> None:
    library = byte_level()
    parsed = json.loads(library.to_str())
    for token in parsed["added_tokens"]:
        token["special"] = False
    model = save(tmp_path, library, eos_token={"content": "</s>"}, additional_special_tokens=["<|im_end|>", "absent"])
    (model / "tokenizer.json").write_text(json.dumps(parsed))
    ours = load_tokenizer(model)
    assert sorted(ours.seal.private) == ["</s>", "<s>", "<|im_end|>"]
    assert not {1, 4} & set(ours.encode("</s><|im_end|>"))


def test_grammars_leave_special_tokens_out(tmp_path: Path) -> None:
    """For grammars each added token in angle brackets is special anyway, so others are named here."""
    library = byte_level()
    parsed = json.loads(library.to_str())
    ids = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    for token in parsed["added_tokens"]:
        token["special"] = False
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["content"] != "[INST]"]
    parsed["model"]["vocab"]["[INST]"] = ids["[INST]"]
    decoder = {str(ids["[/INST]"]): {"content": "[/INST]", "special": True}}
    model = save(tmp_path, library, additional_special_tokens=["[INST]"], added_tokens_decoder=decoder)
    (model / "tokenizer.json").write_text(json.dumps(parsed))
    texts, grammars = load_tokenizer(model), token_table(model)
    special = [i for i in range(texts.vocab_size) if texts.is_special(i)]
    assert special == sorted(ids[text] for text in ("<s>", "</s>", "[INST]", "[/INST]"))
    assert all(grammars.is_special_token(i) for i in special)


def test_normalized_special_tokens_are_found_everywhere() -> None:
    """Old conversions of Llama 2 set the flag; the library then finds a token only after a space."""
    parsed = definition(byte_fallback())
    plain = Tokenizer(definition(byte_fallback()))
    for token in parsed["added_tokens"]:
        token["normalized"] = True
    ours = Tokenizer(parsed)
    for text in ("<s>a</s>", "x<s> [INST] y [/INST]</s>"):
        assert ours.encode_sealed(ours.seal(text)) == plain.encode_sealed(plain.seal(text))


def test_long_text_does_not_hold_the_interpreter_lock() -> None:
    """Other threads run during tokenizing; the library's `encode` would block them."""
    _, ours = both("byte_level")
    text = "quick brown fox " * 30_000

    def longest_pause() -> float:
        """Return the longest pause of this thread, as a share of the time that tokenizing takes."""
        begin = time.perf_counter()
        ours.encode(text)
        alone = time.perf_counter() - begin
        thread = threading.Thread(target=ours.encode, args=(text,))
        last, longest = time.perf_counter(), 0.0
        thread.start()
        while thread.is_alive():
            time.sleep(0.0005)
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)
        return longest / alone

    assert any(longest_pause() < 0.5 for _ in range(20))  # one pass suffices: a busy machine adds pauses


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_texts_equal_the_librarys(kind: str, data: st.DataObject) -> None:
    library, ours = both(kind)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 2), max_size=12))
    if not _is_well_formed(library, ids):
        ids = [i for i in ids if not _byte(library, i)]
    for keep in (False, True):
        assert decode(ours, ids, keep_special=keep) == library.decode(ids, skip_special_tokens=not keep)


def _byte(library: Library, token_id: int) -> int | None:
    match = re.fullmatch(r"<0x(..)>", library.id_to_token(token_id) or "")
    return int(match[1], 16) if match else None


def _is_well_formed(library: Library, ids: list[int]) -> bool:
    """Return whether all runs of byte tokens are UTF-8. Otherwise the library replaces valid characters too."""
    runs = "".join(f"{b:02x}" if (b := _byte(library, i)) is not None else " " for i in ids).split()
    try:
        return all(bytes.fromhex(run).decode() is not None for run in runs)
    except UnicodeDecodeError:
        return False


def test_bad_byte_keeps_the_characters_before_it() -> None:
    """The library replaces the whole run of bytes, but a stream has already sent the valid ones."""
    library, ours = both("byte_fallback")
    ids = [library.token_to_id(f"<0x{b:02X}>") for b in "😀".encode() + b"\xff"]
    assert decode(ours, ids, keep_special=False) == "😀\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_like", "metaspace_first"])
@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_text_round_trip(kind: str, text: str) -> None:
    _, ours = both(kind)
    # These models add one leading space, and write a space as "▁".
    text = text.lstrip(" ").replace("▁", "_")
    assert decode(ours, ours.encode(text), keep_special=False) == text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "has no tokenizer.json"),
        ("{", "is not JSON"),
        ("[]", "does not contain a JSON object"),
        ('{"model": 3}', "cannot be used"),
        ("\xff", "is not JSON"),
        ('{"model":' * 100_000, "nested too deeply"),
    ],
)
def test_broken_tokenizer_file_is_named_in_the_error(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_decoder_that_needs_context_is_rejected(decoder: object) -> None:
    library = byte_fallback()
    library.decoder = decoder
    with pytest.raises(ConfigurationError, match="token by token"):
        Tokenizer(definition(library))
