"""Tokenizer, streaming detokenisation, stop conditions and sampling defaults, on tokenizers made here."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tritonmoe.errors import InputError, TokenizerError
from tritonmoe.text.generation_config import sampling_defaults, stop_token_ids
from tritonmoe.text.streaming import IncrementalDecoder, StopStringMatcher
from tritonmoe.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world, hello there. The cat's hat — naïve façade.",
    "日本語のテキスト and 😀😃 emoji\n\n\tindented",
    "  two spaces,   three",
    "�",
]
SPECIAL = ["<s>", "</s>", "<|end|>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens(["<think>"])
    return backend


def sentencepiece_like(decoder: Any) -> tokenizers.Tokenizer:
    """Words that carry their leading space, single characters, and a token for each byte."""
    pieces = ["▁", "▁hello", "▁world", "wor", "ld", "a", ".", "▁▁", "é", "�", "▁�"]
    vocab = {token: token_id for token_id, token in enumerate(SPECIAL + BYTE_TOKENS + pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    backend.add_special_tokens(SPECIAL)
    backend.decoder = decoder
    return backend


def word_piece() -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate([*SPECIAL, "hello", "##ing", ".", "do", "n't"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<s>"))
    backend.add_special_tokens(SPECIAL)
    backend.decoder = decoders.WordPiece()
    return backend


BACKENDS = {
    "byte_level": byte_level(),
    "llama": sentencepiece_like(decoders.Sequence([*LLAMA_DECODER, decoders.Strip(" ", 1, 0)])),
    "gemma": sentencepiece_like(decoders.Sequence(LLAMA_DECODER)),
    "metaspace": sentencepiece_like(decoders.Metaspace()),
    "none": sentencepiece_like(None),
    "word_piece": word_piece(),
}
TOKENIZERS = {name: Tokenizer(backend, {"eos_token": "</s>"}) for name, backend in BACKENDS.items()}


def save(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BACKENDS["byte_level"].save(str(tmp_path / "tokenizer.json"))
    return tmp_path


# Reading the files


def test_round_trip_and_size(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == BACKENDS["byte_level"].get_vocab_size()
    assert tokenizer.special_tokens == {}
    assert tokenizer.bos_token is None


def test_special_tokens_are_read_in_every_form(folder: Path) -> None:
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "image_token": "<img>",
        "add_bos_token": True,
        "extra_special_tokens": {"audio_token": "<aud>"},
    }
    save(folder, "tokenizer_config.json", config)
    save(folder, "special_tokens_map.json", {"unk_token": {"content": "<unk>"}})
    expected = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<img>",
        "audio_token": "<aud>",
        "unk_token": "<unk>",
    }
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == expected
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    save(folder, "tokenizer_config.json", config | {"added_tokens_decoder": {}})
    assert "unk_token" not in Tokenizer.from_folder(folder).special_tokens


def test_special_token_of_the_vocabulary_is_not_split(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<": 3, "<ab>": 4, ">": 5}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("<ab>")) > 1
    save(tmp_path, "tokenizer_config.json", {"eos_token": "<ab>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<ab>") == [4]
    assert tokenizer.vocab_size == 6


def test_plain_prompt_gets_what_the_post_processor_adds(folder: Path) -> None:
    backend = byte_level()
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    plain = tokenizer.encode("Hello")
    assert tokenizer.encode("Hello", add_special_tokens=True) == [bos, *plain]
    assert tokenizer.encode("<s>Hello") == [bos, *plain]


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=40)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_missing_tokenizer_names_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="sentencepiece"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {"type": "Nothing"}}', b"\xff\xfe{}"])
def test_broken_tokenizer_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"^[^\n]*tokenizer\.json[^\n]*$"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", "1"])
def test_broken_tokenizer_config_is_an_error(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_prompt_that_is_not_unicode() -> None:
    with pytest.raises(InputError, match="UTF-8"):
        TOKENIZERS["byte_level"].encode("bad \udcff")


# Streaming detokenisation


def stream(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    for skip in (False, True):
        assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.sampled_from(TOKENIZERS["byte_level"].encode("😀é日�\u00ad a")), max_size=80))
def test_pieces_of_broken_characters_add_up(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_unfinished_characters_are_held_back() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a𐍈b")  # a letter that no training text has: one token a byte
    assert len(ids) == 6
    assert stream(tokenizer, ids) == ["a", "", "", "", "𐍈", "b", ""]
    assert stream(tokenizer, ids[:3])[-1] == "�"


def test_leading_spaces_survive_in_sentencepiece_decoders() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [tokenizer.token_to_id(token) for token in ("▁hello", "▁world", "▁", "▁world", ".")]
    assert stream(tokenizer, ids) == ["hello", " world", " ", " world", ".", ""]


def test_byte_tokens_appear_when_their_run_ends() -> None:
    tokenizer = TOKENIZERS["gemma"]
    ids = [tokenizer.token_to_id(token) for token in ("a", "<0xE2>", "<0x82>", "<0xAC>", ".")]
    assert stream(tokenizer, ids) == ["a", "", "", "", "€.", ""]
    assert stream(tokenizer, ids[:4])[-1] == "€"


def test_special_tokens_are_shown_unless_skipped() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("Hello<|end|><think>!</s>")
    assert "".join(stream(tokenizer, ids)) == "Hello<|end|><think>!</s>"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=True)) == "Hello<think>!"


def test_a_flushed_decoder_starts_anew() -> None:
    tokenizer = TOKENIZERS["llama"]
    decoder = IncrementalDecoder(tokenizer)
    hello = tokenizer.token_to_id("▁hello")
    assert decoder.push(hello) + decoder.flush() + decoder.push(hello) == "hellohello"


class CountingTokenizer(Tokenizer):
    """Remembers the longest sequence it was asked to decode."""

    longest = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.longest = max(self.longest, len(ids))
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("text", ["a", "😀", "�", " "])
def test_work_per_token_is_bounded(text: str) -> None:
    tokenizer = CountingTokenizer(byte_level(), {})
    for token_id in tokenizer.encode(text):  # includes single bytes of a character, for ever invalid
        decoder = IncrementalDecoder(tokenizer)
        tokenizer.longest = 0
        pieces = [decoder.push(token_id) for _ in range(300)]
        assert tokenizer.longest <= IncrementalDecoder.MAX_WINDOW + 4
        assert "".join([*pieces, decoder.flush()]) == tokenizer.decode([token_id] * 300)


# Stop strings


def match(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    matcher = StopStringMatcher(stops)
    emitted, stopped = [], False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        emitted.append(text)
    return "".join([*emitted, matcher.flush()]), stopped


def test_stop_string_across_pieces() -> None:
    matcher = StopStringMatcher(["END", "\n\n"])
    assert matcher.push("one E") == ("one ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("d\n") == ("ENd", False)
    assert matcher.push("\nmore") == ("", True)
    assert matcher.push("after") == ("", True)
    assert matcher.flush() == ""


def test_held_text_is_flushed() -> None:
    assert match(["END"], ["the E", "N"]) == ("the EN", False)
    assert match([], ["any", "thing"]) == ("anything", False)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        StopStringMatcher(["a", ""])


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_stop_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [text[:end] for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = (text, False)
    if ends:
        longest = max(len(stop) for stop in stops if ends[0].endswith(stop))
        expected = (ends[0][: len(ends[0]) - longest], True)
    assert match(stops, pieces) == expected


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), text=st.text("abc", max_size=20))
def test_nothing_is_held_without_need(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops)
    emitted, stopped = matcher.push(text)
    held = matcher.flush()
    assert stopped or emitted + held == text
    assert held == "" or any(stop.startswith(held) for stop in stops)


# Stop ids and sampling defaults


def test_stop_ids_are_the_union_of_all_files(folder: Path) -> None:
    save(folder, "generation_config.json", {"eos_token_id": [5, 6]})
    save(folder, "tokenizer_config.json", {"eos_token": "</s>"})
    tokenizer = Tokenizer.from_folder(folder)
    config = {"eos_token_id": 7, "text_config": {"eos_token_id": [8]}}
    assert stop_token_ids(folder, config, tokenizer) == {5, 6, 7, 8, tokenizer.token_to_id("</s>")}


def test_no_file_names_a_stop_id(folder: Path) -> None:
    assert stop_token_ids(folder, {"eos_token_id": None}, Tokenizer.from_folder(folder)) == frozenset()


@pytest.mark.parametrize("value", ["2", [1, None], True, -1, 2.0, {"a": 1}, [[1]]])
def test_malformed_stop_id_is_an_error(folder: Path, value: Any) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(TokenizerError, match=r"config\.json: eos_token_id"):
        stop_token_ids(folder, {"eos_token_id": value}, tokenizer)


def test_stop_id_outside_the_vocabulary(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    with caplog.at_level(logging.WARNING):
        assert stop_token_ids(folder, {"eos_token_id": [1, 99999]}, tokenizer) == {1}
    assert "99999" in caplog.text
    # The embedding table may be larger than the tokenizer.
    assert stop_token_ids(folder, {"eos_token_id": 99999, "vocab_size": 100000}, tokenizer) == {99999}
    with pytest.raises(TokenizerError, match="never stop"):
        stop_token_ids(folder, {"eos_token_id": 99999}, tokenizer)


@pytest.mark.parametrize("eos", [200002, [200002, 200007], [200002, 199999, 200012], None])
def test_gpt_oss_stops_on_its_three_tokens_only(folder: Path, eos: Any) -> None:
    save(folder, "generation_config.json", {"eos_token_id": eos})
    config = {"model_type": "gpt_oss", "vocab_size": 201088, "eos_token_id": 200002}
    stops = stop_token_ids(folder, config, Tokenizer.from_folder(folder))
    assert stops == {200002, 199999, 200012}


def test_gpt_oss_with_a_small_vocabulary(folder: Path) -> None:
    config = {"model_type": "gpt_oss", "eos_token_id": 3}
    assert stop_token_ids(folder, config, Tokenizer.from_folder(folder)) == {3}


def test_sampling_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1}
    save(tmp_path, "generation_config.json", given | {"min_p": None, "eos_token_id": 1})
    assert sampling_defaults(tmp_path) == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", 1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_k", 20.0),
        ("top_k", -2),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_malformed_sampling_default_is_an_error(tmp_path: Path, name: str, value: Any) -> None:
    save(tmp_path, "generation_config.json", {name: value})
    with pytest.raises(TokenizerError, match=f"{name} must be"):
        sampling_defaults(tmp_path)
