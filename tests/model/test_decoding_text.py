"""Text of a growing answer: whole characters, nothing of a stop string, the same whatever came together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model.decoding.text import REPLACEMENT, TextTracker
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXT = st.text(st.sampled_from("ab cd\n.é€😀한"), max_size=40)


def byte_ids(text: str) -> list[int]:
    """One token a byte."""
    return TOKENIZER(text, add_special_tokens=False).input_ids


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a leading mark for the space, bytes for the rest: what SentencePiece models bring."""
    words = ["<unk>", "▁a", "▁bc", "d", "▁", "é", *(f"<0x{i:02X}>" for i in range(256))]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@given(text=TEXT, every=st.integers(1, 7))
@settings(deadline=None, max_examples=80)
def test_deltas_are_whole_characters_and_add_up_to_the_text(text: str, every: int) -> None:
    tracker = TextTracker(TOKENIZER)
    taken = []
    for i, token in enumerate(byte_ids(text)):
        assert not tracker.push(token)
        if i % every == 0:
            taken.append(tracker.take())
    tracker.finish()
    taken.append(tracker.take())
    assert REPLACEMENT not in "".join(taken)
    assert "".join(taken) == tracker.text == text


@given(text=TEXT, stops=st.lists(st.text(st.sampled_from("ab cé😀"), min_size=1, max_size=4), min_size=1, max_size=3))
@settings(deadline=None, max_examples=150)
def test_the_text_ends_before_the_first_stop_string_and_never_shows_a_part_of_it(text: str, stops: list[str]) -> None:
    tracker = TextTracker(TOKENIZER, tuple(stops))
    ids, shown, used = byte_ids(text), "", 0
    for token in ids:
        used += 1
        if tracker.push(token):
            break
        shown += tracker.take()
        whole = TOKENIZER.decode(ids[:used]).rstrip(REPLACEMENT)
        assert not any(stop in whole for stop in stops), "the stop string was complete already"
        longest = max((n for s in stops for n in range(1, len(s)) if whole.endswith(s[:n])), default=0)
        assert shown == whole[: len(whole) - longest]
    tracker.finish()
    shown += tracker.take()
    ends = [text.find(stop) for stop in stops if stop in text]
    complete = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert shown == tracker.text
    if not ends:
        assert shown == text and used == len(ids)
    else:
        assert used == len(byte_ids(text[: min(complete)])), "the answer ends with the token that completes the string"
        assert shown == text[: min(e for e, c in zip(ends, complete, strict=True) if c == min(complete))]


def test_an_unfinished_character_shows_only_at_the_end() -> None:
    tracker = TextTracker(TOKENIZER)
    for token in byte_ids("x€")[:-1]:
        tracker.push(token)
    assert tracker.take() == "x"
    tracker.finish()
    assert tracker.take() == REPLACEMENT


def test_special_tokens_do_not_show() -> None:
    tracker = TextTracker(TOKENIZER)
    for token in [*byte_ids("a"), TOKENIZER.convert_tokens_to_ids("<|spare_0|>"), *byte_ids("b")]:
        tracker.push(token)
    tracker.finish()
    assert tracker.text == "ab"


@pytest.mark.parametrize("length", [5, 40, 120])
def test_words_and_byte_fallback_come_out_as_the_tokenizer_decodes_them(length: int) -> None:
    tokenizer = metaspace_tokenizer()
    ids = [
        1 + (i * i + i // 3) % 5 if i % 4 else 6 + b for i, b in zip(range(length), "é€x😀".encode() * 40, strict=False)
    ]
    tracker = TextTracker(tokenizer)
    shown = ""
    for token in ids:
        tracker.push(token)
        shown += tracker.take()
    tracker.finish()
    shown += tracker.take()
    assert shown == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_long_answers_decode_a_short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = type(TOKENIZER).decode

    def counted(self: PreTrainedTokenizerFast, ids: list[int], **options: bool) -> str:
        lengths.append(len(ids))
        return str(decode(self, ids, **options))

    monkeypatch.setattr(type(TOKENIZER), "decode", counted)
    tracker = TextTracker(TOKENIZER)
    for token in byte_ids("word " * 100):
        tracker.push(token)
    assert max(lengths) < 40
