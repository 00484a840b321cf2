"""Where tokens begin is told alike by their bytes and by the tokenizer's own offsets, on any text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipelines.chats.records import Chat
from pipelines.chats.template import ChatEncoder, Encoded
from pipelines.chats.token_bytes import TokenBytes, token_places
from tests.conftest import shared_folder
from tests.tiny import tiny_tokenizer

REAL = ("qwen2_5", "qwen3")
contents = st.text(st.sampled_from("ab Z9\n\t.'é漢\U0001f600e\u0301\u0958\u200d<|im_end|>"), min_size=1, max_size=24)


@cache
def encoders(name: str) -> tuple[ChatEncoder, ChatEncoder]:
    """Of one tokenizer: by bytes, and by offsets."""
    folder = Path(shared_folder(), "data", "tokenizers", name)
    by_bytes, by_offsets = (ChatEncoder(AutoTokenizer.from_pretrained(folder)) for _ in range(2))
    assert by_bytes._bytes is not None
    by_offsets._bytes = None
    return by_bytes, by_offsets


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(contents.filter(str.strip), min_size=2, max_size=4))
def test_bytes_and_offsets_supervise_the_same_tokens(shared: Path, name: str, turns: list[str]) -> None:
    roles = ("user", "assistant")
    chat = Chat(tuple({"role": roles[number % 2], "content": text} for number, text in enumerate(turns)))
    told = [encoder.encode([chat])[0] for encoder in encoders(name)]
    if not isinstance(told[0], list):
        assert str(told[0]) == str(told[1])
        return
    for one, other in zip(*told, strict=True):
        assert isinstance(one, Encoded) and isinstance(other, Encoded)
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.supervised, other.supervised)
        assert one.cuts == other.cuts


def test_the_ends_are_those_of_the_texts_bytes(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "tokenizers" / "qwen2_5")
    told = TokenBytes.of(tokenizer)
    assert told is not None
    text = "<|im_start|>naïve 漢字 \U0001f600!<|im_end|>\n"
    (ids,) = told.encode([text])
    ends = told.ends(ids, text)
    assert ends is not None and ends[-1] == len(text.encode())
    for count in range(len(ids) + 1):
        piece = text.encode()[: ends[count - 1] if count else 0]
        assert tokenizer.decode(ids[:count]) == piece.decode(errors="replace")


@pytest.mark.parametrize("text", ["e\u0301", "a\u0958b", "\u0958" + 3 * "\u212b"])  # the last: as long
def test_a_text_that_the_tokenizer_rewrites_is_left_to_the_offsets(shared: Path, text: str) -> None:
    told = TokenBytes.of(AutoTokenizer.from_pretrained(shared / "data" / "tokenizers" / "qwen2_5"))
    assert told is not None
    assert told.ends(told.encode([text])[0], text) is None


def test_an_edge_is_a_place_only_where_a_token_ends() -> None:
    ends, text = np.array([1, 3, 7]), "aé\U0001f600"
    assert token_places(ends, text, [0, 1, 2, 3]) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert token_places(np.array([1, 7]), text, [0, 2]) is None


def test_only_byte_level_tokenizers_are_told_by_bytes() -> None:
    assert TokenBytes.of(tiny_tokenizer()) is not None

    def built(pre_tokenizer: object, normalizer: object = None) -> PreTrainedTokenizerFast:
        backend = Tokenizer(BPE({"a": 0}, []))
        backend.pre_tokenizer = pre_tokenizer
        backend.normalizer = normalizer
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    assert TokenBytes.of(built(ByteLevel(add_prefix_space=False))) is not None
    assert TokenBytes.of(built(ByteLevel(add_prefix_space=True))) is None
    assert TokenBytes.of(built(Metaspace())) is None
    assert TokenBytes.of(built(ByteLevel(add_prefix_space=False), NFKC())) is None
