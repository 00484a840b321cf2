"""Where tokens begin in a text, from the bytes that each of them stands for.

A byte-level tokenizer (GPT-2's kind: Qwen, Llama 3, SmolLM) writes a text's UTF-8 bytes, each as one character of its
vocabulary, so lengths tell where a token begins. That spares the tokenizer its own count of character offsets, a sixth
of its time. Other tokenizers, and texts that theirs rewrites, are left to the offsets.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

REMEMBERED = 200_000  # words whose tokens the tokenizer keeps, some 20 MB; its own 10,000 are soon full


class TokenBytes:
    """lengths: int32 [V], UTF-8 bytes of every token."""

    def __init__(self, backend: Any, lengths: np.ndarray, form: str | None) -> None:
        self._backend = backend
        self._lengths = lengths
        self._form = form

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self | None:
        """None where the tokenizer is not byte-level, or changes texts in another way than Unicode's NFC."""
        if not tokenizer.is_fast:
            return None
        backend = tokenizer.backend_tokenizer
        told = json.loads(backend.to_str())
        form = (told["normalizer"] or {}).get("type")
        if form not in (None, "NFC") or not _is_byte_level(told["pre_tokenizer"]):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
        for token, index in vocabulary.items():
            lengths[index] = len(token)
        for index, token in backend.get_added_tokens_decoder().items():
            lengths[index] = len(token.content.encode())
        backend.no_truncation()
        backend.no_padding()
        resize = getattr(backend.model, "_resize_cache", None)  # only for speed, and not of the public interface
        if resize is not None:
            resize(REMEMBERED)
        return cls(backend, lengths, form)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [T]."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def ends(self, ids: np.ndarray, text: str) -> np.ndarray | None:
        """Bytes of the text up to the end of each token, int [T]; None where that cannot be told."""
        if self._form is not None and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            return None
        ends = np.cumsum(self._lengths[ids])
        size = len(text) if text.isascii() else len(text.encode())
        return ends if len(ends) and ends[-1] == size else None


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether it ends in GPT-2's bytes as characters, and adds no space of its own."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    last = steps[-1]
    known = all(step.get("type") in ("Split", "Digits", "ByteLevel") for step in steps)
    return known and last.get("type") == "ByteLevel" and not last.get("add_prefix_space", True)


def token_places(ends: np.ndarray, text: str, edges: Sequence[int]) -> dict[int, int] | None:
    """Token index at each character edge; None where a token lies across one."""
    at = edges if text.isascii() else [len(text[:edge].encode()) for edge in edges]
    before = np.searchsorted(ends, at, side="right")
    if not all(byte == 0 or (place and ends[place - 1] == byte) for byte, place in zip(at, before, strict=True)):
        return None
    return dict(zip(edges, before.tolist(), strict=True))
