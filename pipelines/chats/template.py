"""A chat as tokens, and which of them the assistant wrote.

pipelines/chats/render.py finds the characters. Here they become tokens: the edges of what the assistant wrote must fall
between tokens of the whole text, else the pieces are tokenized apart and must decode to the same text, else the chat is
rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from model.chat_template import ensure_chat_template
from pipelines.chats.records import Document, Rejected
from pipelines.chats.render import Rendered, Renderer
from pipelines.chats.token_bytes import TokenBytes, token_places


@dataclass(frozen=True)
class Encoded:
    """A document in tokens. input_ids int32 [T], supervised bool [T]; cuts: positions where it may be cut at a turn;
    unlearnt: answers that are not supervised (see Rendered)."""

    input_ids: np.ndarray
    supervised: np.ndarray
    cuts: tuple[int, ...] = ()
    unlearnt: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


class ChatEncoder:
    """Renders and tokenizes with one tokenizer. `plain`: it had no chat template and was given the plain one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.plain = ensure_chat_template(tokenizer)
        self._render = Renderer(tokenizer)
        self._bytes = TokenBytes.of(tokenizer)

    def encode(self, documents: Sequence[Document]) -> list[list[Encoded] | Rejected]:
        """For each document its encoded form (several for a chat that had to be unrolled), or why it is rejected."""
        rendered = [self._render(document) for document in documents]
        texts = [one.text for item in rendered if not isinstance(item, Rejected) for one in item]
        encodings = iter(self._tokenize(texts))
        return [item if isinstance(item, Rejected) else self._encode(item, encodings) for item in rendered]

    def _encode(self, rendered: list[Rendered], encodings: Any) -> list[Encoded] | Rejected:
        tokens = [next(encodings) for _ in rendered]  # taken first: a rejected document must not leave any behind
        try:
            found = [self._align(one, encoding) for one, encoding in zip(rendered, tokens, strict=True)]
        except Rejected as error:
            return error
        if not any(one.supervised.any() for one in found):
            return Rejected("no supervised tokens", "the template renders nothing that the assistant wrote")
        return found

    def _tokenize(self, texts: list[str]) -> list[Any]:
        """One array of ids a text where bytes tell where its tokens begin, else a backend encoding with offsets."""
        if not texts:
            return []
        if self._bytes is not None:
            return self._bytes.encode(texts)
        if not self.tokenizer.is_fast:
            return [None] * len(texts)
        return self._with_offsets(texts)

    def _with_offsets(self, texts: list[str]) -> list[Any]:
        encodings: list[Any] = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        ).encodings
        return encodings

    def _align(self, rendered: Rendered, encoding: Any) -> Encoded:
        edges = sorted({0, len(rendered.text), *rendered.cuts, *(edge for span in rendered.spans for edge in span)})
        if self._bytes is not None:
            ends = self._bytes.ends(encoding, rendered.text)
            if ends is not None:
                found = token_places(ends, rendered.text, edges)
                return self._apart(rendered, edges) if found is None else _encoded(rendered, encoding, found)
            encoding = self._with_offsets([rendered.text])[0]
        places = None if encoding is None else _token_edges(encoding, edges, len(rendered.text))
        if encoding is not None and places is not None:
            return _encoded(rendered, np.array(encoding.ids, dtype=np.int32), places)
        return self._apart(rendered, edges)

    def _apart(self, rendered: Rendered, edges: list[int]) -> Encoded:
        """Tokenize the text between the edges piece by piece; it must still decode to the same text."""
        pieces = [self._ids(rendered.text[start:end]) for start, end in pairwise(edges)]
        ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
        whole = self._ids(rendered.text)
        decode: Callable[..., str] = self.tokenizer.decode
        if decode(ids.tolist(), skip_special_tokens=False) != decode(whole, skip_special_tokens=False):
            raise Rejected("tokenizer", "it does not split the text where an answer begins or ends")
        places = dict(zip(edges, np.cumsum([0, *map(len, pieces)]).tolist(), strict=True))
        return _encoded(rendered, ids, places)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _token_edges(encoding: Any, edges: list[int], length: int) -> dict[int, int] | None:
    """Token index at each character edge; None where a token lies across one."""
    places: dict[int, int] = {}
    for edge in edges:
        token = len(encoding.ids) if edge == length else encoding.char_to_token(edge)
        if token is None or (edge < length and encoding.token_to_chars(token)[0] != edge):
            return None
        if token > 0 and edge > 0 and encoding.token_to_chars(token - 1)[1] > edge:
            return None
        places[edge] = token
    return places


def _encoded(rendered: Rendered, ids: np.ndarray, places: dict[int, int]) -> Encoded:
    supervised = np.zeros(len(ids), dtype=bool)
    for start, end in rendered.spans:
        supervised[places[start] : places[end]] = True
    return Encoded(ids, supervised, tuple(sorted({places[cut] for cut in rendered.cuts})), rendered.unlearnt)
