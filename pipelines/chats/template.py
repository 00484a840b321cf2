"""A chat as tokens, and which of them the assistant wrote.

Supervised are every assistant turn's content and the end-of-turn token behind it; the newline that many templates put
after that token is not, since no one ever generates it.

Where a turn begins and ends is found without knowing the template, by rendering prefixes of the chat:

    render(messages[:i], generation prompt)   |  what the model is given when it answers turn i
    render(messages[:i + 1])                  |  the same, with the answer and its end
    render(messages)                          |  must begin with both, or the template rewrites earlier turns

A template that rewrites earlier turns (Qwen3 drops their thinking) gets one document per assistant turn, each rendered
as the model would have seen it. A template with `{% generation %}` markers says itself what the assistant wrote. Both
are verified: the boundaries must fall between tokens, else the pieces are tokenized apart and must decode to the same
text, else the chat is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from model.chat_template import ensure_chat_template
from pipelines.chats.records import Chat, Document, Message, PlainText, Rejected

_OPENING = "An answer before any question."
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A chat as text. spans: [start, end) characters the assistant wrote. cuts: characters where an exchange begins."""

    text: str
    spans: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """A document in tokens. input_ids int32 [T], supervised bool [T]; cuts: positions where it may be cut at a turn."""

    input_ids: np.ndarray
    supervised: np.ndarray
    cuts: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)


class ChatEncoder:
    """Renders and tokenizes with one tokenizer. `plain`: it had no chat template and was given the plain one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.plain = ensure_chat_template(tokenizer)
        self._template = tokenizer.get_chat_template()
        self._marked = _MARKER.search(self._template) is not None
        specials = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials |= set(tokenizer.all_special_tokens)
        ordered = sorted((token for token in specials if token), key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(token) for token in ordered) or r"(?!)")

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

    # Rendering ------------------------------------------------------------------------------------------------------

    def _render(self, document: Document) -> list[Rendered] | Rejected:
        if isinstance(document, PlainText):
            return [self._plain_text(document)]
        try:
            return self._marked_chat(document) if self._marked else self._chat(document)
        except Rejected as error:
            return error
        except (jinja2.TemplateError, TypeError) as error:
            return Rejected("chat template", str(error).strip() or type(error).__name__)

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The chat as the template renders it. prompt: with the generation prompt behind it."""
        rendered: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        return rendered

    def _plain_text(self, document: PlainText) -> Rendered:
        """bos, the text, eos, as far as the tokenizer has them."""
        bos = self.tokenizer.bos_token or ""
        text = bos + document.text + (self.tokenizer.eos_token or "")
        return Rendered(text, ((len(bos), len(text)),), ())

    def _chat(self, chat: Chat) -> list[Rendered]:
        whole = self.text(chat.messages)
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        spans = {index: self._span(chat.messages, index) for index in turns}
        learnt = {index: span for index, span in spans.items() if span is not None}
        if not learnt:
            raise Rejected("chat template", "it renders no answer as the generation prompt followed by the answer")
        if all(whole.startswith(through) for _, through in learnt.values()):
            ends = [len(through) for _, through in learnt.values()]
            return [Rendered(whole, self._trimmed(whole, learnt.values()), _cuts(chat, learnt, ends, len(whole)))]
        return [Rendered(through, self._trimmed(through, [(start, through)]), ()) for start, through in learnt.values()]

    def _span(self, messages: Sequence[Message], index: int) -> tuple[int, str] | None:
        """(where the answer of turn `index` begins, the text through its end); None where that cannot be told."""
        through = self.text(messages[: index + 1])
        before = self.text(messages[:index], prompt=True) if index else self._before_opening()
        return (len(before), through) if through.startswith(before) else None

    def _before_opening(self) -> str:
        """What stands before an answer that opens a chat: templates cannot render the nothing before it."""
        return self.text([{"role": "assistant", "content": _OPENING}]).partition(_OPENING)[0]

    def _trimmed(self, text: str, spans: Any) -> tuple[tuple[int, int], ...]:
        """(start, end) of each (start, text through the turn), the end moved back to the end-of-turn token."""
        return tuple((start, start + self._end_of_turn(text[start : len(through)])) for start, through in spans)

    def _end_of_turn(self, piece: str) -> int:
        """Length of an assistant's piece without the blanks behind its last special token."""
        ends = [found.end() for found in self._special.finditer(piece)]
        return ends[-1] if ends and not piece[ends[-1] :].strip() else len(piece)

    def _marked_chat(self, chat: Chat) -> list[Rendered]:
        texts, indices = render_jinja_template(
            [list(chat.messages)],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        text = texts[0]
        spans = tuple((start, self._with_end_of_turn(text, end)) for start, end in indices[0] if end > start)
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        through = {index: self.text(chat.messages[: index + 1]) for index in turns}
        ends = {index: len(one) for index, one in through.items() if text.startswith(one)}
        return [Rendered(text, spans, _cuts(chat, ends, list(ends.values()), len(text)))]

    def _with_end_of_turn(self, text: str, end: int) -> int:
        """Markers often stop before the end-of-turn token: take it in."""
        found = self._special.match(text, end)
        return found.end() if found else end

    # Tokens ---------------------------------------------------------------------------------------------------------

    def _tokenize(self, texts: list[str]) -> list[Any]:
        """One backend encoding (ids and character offsets) a text."""
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            return [None] * len(texts)
        encodings: list[Any] = self.tokenizer(texts, add_special_tokens=False, verbose=False).encodings
        return encodings

    def _align(self, rendered: Rendered, encoding: Any) -> Encoded:
        edges = sorted({0, len(rendered.text), *rendered.cuts, *(edge for span in rendered.spans for edge in span)})
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


def _cuts(chat: Chat, turns: Any, ends: list[int], length: int) -> tuple[int, ...]:
    """Ends of assistant turns after which a system or user message follows."""
    roles = [message["role"] for message in chat.messages] + ["end"]
    found = (end for index, end in zip(turns, ends, strict=True) if roles[index + 1] in ("system", "user"))
    return tuple(sorted({end for end in found if 0 < end < length}))


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
    return Encoded(ids, supervised, tuple(sorted({places[cut] for cut in rendered.cuts})))
