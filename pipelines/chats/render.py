"""A chat as text, and which characters of it the assistant wrote.

Supervised are every assistant turn's content (its tool calls too) and the end-of-turn tokens behind it; the newline
that many templates put after those is not, since no one ever generates it.

Where a turn begins and ends is found without knowing the template, by rendering prefixes of the chat:

    render(messages[:i], generation prompt)   |  what the model is given when it answers turn i
    render(messages[:i + 1])                  |  the same, with the answer and its end
    render(messages)                          |  must begin with both, or the template rewrites earlier turns

A template that rewrites earlier turns (Qwen3 drops their thinking) gets one document per assistant turn, each rendered
as the model would have seen it. A template with `{% generation %}` markers says itself what the assistant wrote.

Those renderings grow with the square of a chat's turns. So for every sequence of roles they are made once, of a probe
whose contents are told apart, which gives the form: the text around the contents, with the edges in it. A chat whose
own rendering is exactly its contents put into the form has its edges there; any other is rendered by prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from pipelines.chats.records import Chat, Document, Message, PlainText, Rejected, called_names

FORMS = 1024  # sequences of roles that are remembered
_OPENING = "An answer before any question."
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

Place = tuple[int, int]  # a literal of a form, and characters from its beginning

TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ArithmeticError, RecursionError)  # of what a template computes


@dataclass(frozen=True)
class Rendered:
    """A chat as text. spans: [start, end) characters the assistant wrote. cuts: characters where an exchange begins.
    unlearnt: answers that are not among the spans, because the template prompts them otherwise than it renders them."""

    text: str
    spans: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...]
    unlearnt: int = 0


@dataclass(frozen=True)
class Form:
    """What a template puts around the contents of chats with the same roles: one literal more than messages."""

    literals: tuple[str, ...]
    spans: tuple[tuple[Place, Place], ...]
    cuts: tuple[Place, ...]

    @classmethod
    def of_probe(cls, rendered: Rendered, contents: Sequence[str]) -> Form | None:
        """The form in a rendered probe; None where a content is not in it once and in order, or an edge lies in one."""
        literals, rest = [], rendered.text
        for content in contents:
            literal, found, rest = rest.partition(content)
            if not found:
                return None
            literals.append(literal)
        literals.append(rest)
        if rendered.text.count(_PROBE) != 2 * len(contents):
            return None
        begins = _begins(literals, contents)
        edges = {edge for span in rendered.spans for edge in span} | set(rendered.cuts)
        places = {edge: _place(edge, begins, literals) for edge in edges}
        if rendered.unlearnt or None in places.values():
            return None
        found_places: dict[int, Any] = places
        spans = tuple((found_places[start], found_places[end]) for start, end in rendered.spans)
        return cls(tuple(literals), spans, tuple(found_places[cut] for cut in rendered.cuts))

    def fill(self, contents: Sequence[str]) -> Rendered:
        """The chat with these contents."""
        begins = _begins(self.literals, contents)
        text = "".join(part for pair in zip(self.literals, (*contents, ""), strict=True) for part in pair)
        spans = tuple((begins[a] + i, begins[b] + j) for (a, i), (b, j) in self.spans)
        return Rendered(text, spans, tuple(begins[a] + i for a, i in self.cuts))


_PROBE = "Zq"


def _probe(index: int) -> str:
    """A content that no template changes and nothing else holds."""
    return f"{_PROBE}{index}{_PROBE}"


def _begins(literals: Sequence[str], contents: Sequence[str]) -> list[int]:
    """Where each literal begins in the text."""
    begins, at = [], 0
    for literal, content in zip(literals, (*contents, ""), strict=True):
        begins.append(at)
        at += len(literal) + len(content)
    return begins


def _place(edge: int, begins: Sequence[int], literals: Sequence[str]) -> Place | None:
    for number, (begin, literal) in enumerate(zip(begins, literals, strict=True)):
        if begin <= edge <= begin + len(literal):
            return number, edge - begin
    return None


class Renderer:
    """Renders with the chat template of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._template = tokenizer.get_chat_template()
        self._marked = _MARKER.search(self._template) is not None
        specials = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials |= set(tokenizer.all_special_tokens)
        ordered = sorted((token for token in specials if token), key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(token) for token in ordered) or r"(?!)")
        self._forms: dict[tuple[str, ...], Form | None] = {}

    def __call__(self, document: Document) -> list[Rendered] | Rejected:
        """The document as text (several for a chat that had to be unrolled), or why it is rejected."""
        if isinstance(document, PlainText):
            return [self._plain_text(document)]
        try:
            return self._by_form(document) or self.by_prefixes(document)
        except Rejected as error:
            return error
        except TEMPLATE_FAULTS as error:
            return Rejected("chat template", str(error).strip() or type(error).__name__)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        """The chat as the template renders it. prompt: with the generation prompt behind it."""
        rendered: str = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )
        return rendered

    def by_prefixes(self, chat: Chat) -> list[Rendered]:
        """The chat without any form. Raises Rejected, and what a template raises."""
        return self._marked_chat(chat) if self._marked else self._chat(chat)

    def _plain_text(self, document: PlainText) -> Rendered:
        """bos, the text, eos, as far as the tokenizer has them."""
        bos = self.tokenizer.bos_token or ""
        text = bos + document.text + (self.tokenizer.eos_token or "")
        return Rendered(text, ((len(bos), len(text)),), ())

    # Forms ----------------------------------------------------------------------------------------------------------

    def _by_form(self, chat: Chat) -> list[Rendered] | None:
        """The chat through the form of its roles; None where it has none or does not fit it."""
        if chat.tools or any(message.keys() - {"role", "content"} for message in chat.messages):
            return None
        roles = tuple(message["role"] for message in chat.messages)
        if roles not in self._forms:
            if len(self._forms) >= FORMS:
                self._forms.clear()
            self._forms[roles] = self._form(roles)
        form = self._forms[roles]
        if form is None:
            return None
        filled = form.fill([message["content"] for message in chat.messages])
        return [filled] if filled.text == self._turns(chat.messages) else None

    def _turns(self, messages: Sequence[Message]) -> str:
        """What `text` gives for messages of a role and a content each, by a shorter way through transformers."""
        texts, _ = render_jinja_template(
            [list(messages)], chat_template=self._template, **self.tokenizer.special_tokens_map
        )
        return str(texts[0])

    def _form(self, roles: tuple[str, ...]) -> Form | None:
        contents = [_probe(index) for index in range(len(roles))]
        probe = Chat(tuple({"role": role, "content": c} for role, c in zip(roles, contents, strict=True)))
        try:
            rendered = self.by_prefixes(probe)
        except (Rejected, *TEMPLATE_FAULTS):
            return None
        return Form.of_probe(rendered[0], contents) if len(rendered) == 1 else None

    # By prefixes ----------------------------------------------------------------------------------------------------

    def _chat(self, chat: Chat) -> list[Rendered]:
        whole = self.text(chat.messages, chat.tools)
        _check_shown(chat.tool_names, whole, "the chat's tools")
        turns = chat.answers
        spans = {index: self._span(chat, index, whole) for index in turns}
        learnt = {index: span for index, span in spans.items() if span is not None}
        if not learnt:
            raise Rejected("chat template", "it renders no answer as the generation prompt followed by the answer")
        for index, (start, through) in learnt.items():
            _check_shown(called_names(chat.messages[index]), through[start:], f"the calls of message {index + 1}")
        unlearnt = len(turns) - len(learnt)
        if all(whole.startswith(through) for _, through in learnt.values()):
            cuts = _cuts(chat, {index: len(through) for index, (_, through) in learnt.items()}, len(whole))
            return [Rendered(whole, self._trimmed(whole, learnt.values()), cuts, unlearnt)]
        unrolled = [
            Rendered(through, self._trimmed(through, [(start, through)]), ()) for start, through in learnt.values()
        ]
        unrolled[0] = Rendered(unrolled[0].text, unrolled[0].spans, (), unlearnt)
        return unrolled

    def _span(self, chat: Chat, index: int, whole: str) -> tuple[int, str] | None:
        """(where the answer of turn `index` begins, the text through its end); None where that cannot be told."""
        last = index == len(chat.messages) - 1
        through = whole if last else self.text(chat.messages[: index + 1], chat.tools)
        before = self.text(chat.messages[:index], chat.tools, prompt=True) if index else self._before_opening(chat)
        return (len(before), through) if through.startswith(before) else None

    def _before_opening(self, chat: Chat) -> str:
        """What stands before an answer that opens a chat: templates cannot render the nothing before it."""
        return self.text([{"role": "assistant", "content": _OPENING}], chat.tools).partition(_OPENING)[0]

    def _trimmed(self, text: str, spans: Iterable[tuple[int, str]]) -> tuple[tuple[int, int], ...]:
        """(start, end) of each (start, text through the turn), the end moved back to the end-of-turn token."""
        return tuple((start, start + self._end_of_turn(text[start : len(through)])) for start, through in spans)

    def _end_of_turn(self, piece: str) -> int:
        """Length of an assistant's piece without the blanks behind its last special token."""
        ends = [found.end() for found in self._special.finditer(piece)]
        return ends[-1] if ends and not piece[ends[-1] :].strip() else len(piece)

    def _marked_chat(self, chat: Chat) -> list[Rendered]:
        texts, indices = render_jinja_template(
            [list(chat.messages)],
            tools=list(chat.tools) or None,
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        text = texts[0]
        _check_shown(chat.tool_names, text, "the chat's tools")
        spans = tuple((start, self._with_end_of_turn(text, end)) for start, end in indices[0] if end > start)
        learnt = "".join(text[start:end] for start, end in spans)
        for index in chat.answers:
            _check_shown(called_names(chat.messages[index]), learnt, f"the calls of message {index + 1}")
        through = {index: self.text(chat.messages[: index + 1], chat.tools) for index in chat.answers}
        ends = {index: len(one) for index, one in through.items() if text.startswith(one)}
        return [Rendered(text, spans, _cuts(chat, ends, len(text)), max(0, len(chat.answers) - len(spans)))]

    def _with_end_of_turn(self, text: str, end: int) -> int:
        """Markers often stop before the end-of-turn tokens: take them in."""
        while found := self._special.match(text, end):
            end = found.end()
        return end


def _cuts(chat: Chat, ends: dict[int, int], length: int) -> tuple[int, ...]:
    """Ends of assistant turns after which a system or user message follows."""
    roles = [message["role"] for message in chat.messages] + ["end"]
    found = (end for index, end in ends.items() if roles[index + 1] in ("system", "user"))
    return tuple(sorted({end for end in found if 0 < end < length}))


def _check_shown(names: Iterable[str], text: str, what: str) -> None:
    """Raises Rejected where the template leaves a tool out: the model would learn to call what it was never shown."""
    for name in names:
        if name not in text:
            raise Rejected("tool calls", f"the chat template does not render {what} ({name})")
