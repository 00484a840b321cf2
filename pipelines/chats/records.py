"""One parsed JSON object (or Parquet row) as a chat: five shapes of records, one parser each.

| format            | record                                                                                       |
|-------------------|----------------------------------------------------------------------------------------------|
| messages          | {"messages": [{"role", "content"}, ...]}                                                     |
| sharegpt          | {"conversations": [{"from", "value"}, ...], "system"?}                                       |
| alpaca            | {"instruction", "input"?, "output", "system"?}                                               |
| prompt_completion | {"prompt", "completion"}, also {"question", "answer"} and {"prompt", "response"}             |
| text              | {"text"}: plain text without turns, all of it supervised                                     |

Keys whose value is null count as absent. Other keys of a record are not read. Anything a template could not render
faithfully (an unknown role, content that is no text, tool calls) is rejected, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SPEAKERS = {
    **ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "observation": "tool",
}  # fmt: skip
PAIRS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"))
NOT_RENDERED = ("tool_calls", "function_call")


class Rejected(Exception):
    """A record that cannot be used. kind: the class it is counted under; the full reason is `kind: detail`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(frozen=True)
class Chat:
    """Messages with role (system, user, assistant, tool) and content; at least one of them the assistant's."""

    messages: tuple[Message, ...]

    @property
    def turns(self) -> int:
        return len(self.messages)


@dataclass(frozen=True)
class PlainText:
    """Text without turns."""

    text: str

    @property
    def turns(self) -> int:
        return 1


Document = Chat | PlainText


def parse(record: Any, format: str) -> Document:
    """The document in a record of the given format. Raises Rejected."""
    if not isinstance(record, Mapping):
        raise Rejected("not an object", f"a line must hold a JSON object, not {_kind(record)}")
    return PARSERS[format]({key: value for key, value in record.items() if value is not None})


def detect(records: Iterable[Any]) -> str | None:
    """The format most of the records have, the first in the table's order when tied; None when none fits any."""
    votes: Counter[str] = Counter()
    for record in records:
        if isinstance(record, Mapping):
            votes.update(name for name, fits in _FITS.items() if fits(record))
    return max(_FITS, key=lambda name: votes[name]) if votes else None


def _fits_pair(record: Mapping[str, Any]) -> bool:
    return any(first in record and second in record for first, second in PAIRS)


_FITS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "messages": lambda record: "messages" in record,
    "sharegpt": lambda record: "conversations" in record,
    "alpaca": lambda record: "instruction" in record and "output" in record,
    "prompt_completion": _fits_pair,
    "text": lambda record: "text" in record,
}


def _messages(record: Mapping[str, Any]) -> Chat:
    return _chat(_turns(record, "messages"), "role", "content", ROLES)


def _sharegpt(record: Mapping[str, Any]) -> Chat:
    turns = _turns(record, "conversations")
    if "system" in record:
        turns = [{"from": "system", "value": record["system"]}, *turns]
    return _chat(turns, "from", "value", SPEAKERS)


def _alpaca(record: Mapping[str, Any]) -> Chat:
    instruction, given = _text(record, "instruction"), _text(record, "input", "")
    question = f"{instruction}\n\n{given}" if given.strip() else instruction
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": _text(record, "output")}]
    if "system" in record:
        turns.insert(0, {"role": "system", "content": _text(record, "system")})
    return _chat(turns, "role", "content", ROLES)


def _prompt_completion(record: Mapping[str, Any]) -> Chat:
    first, second = next((pair for pair in PAIRS if pair[0] in record and pair[1] in record), PAIRS[0])
    for key in (first, second):
        if key not in record:
            raise Rejected("missing key", f"there is no {key!r}, or null")
    turns = _as_turns(record[first], "user") + _as_turns(record[second], "assistant")
    return _chat(turns, "role", "content", ROLES)


def _plain_text(record: Mapping[str, Any]) -> PlainText:
    text = _text(record, "text")
    if not text.strip():
        raise Rejected("no content", "the text is empty")
    return PlainText(_sound(text, "text"))


PARSERS: dict[str, Callable[[Mapping[str, Any]], Document]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "text": _plain_text,
}


def _turns(record: Mapping[str, Any], key: str) -> list[Any]:
    if key not in record:
        raise Rejected("missing key", f"there is no {key!r}, or null")
    turns = record[key]
    if not isinstance(turns, list):
        raise Rejected("wrong type", f"{key!r} must be a list, not {_kind(turns)}")
    if not turns:
        raise Rejected("empty chat", f"{key!r} has no messages")
    return turns


def _as_turns(value: Any, role: str) -> list[Any]:
    """A side of a prompt/completion pair: text, or a list of messages."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _chat(turns: list[Any], role_key: str, text_key: str, roles: Mapping[str, str]) -> Chat:
    messages = tuple(_message(turn, index, role_key, text_key, roles) for index, turn in enumerate(turns))
    if not any(message["role"] == "assistant" for message in messages):
        raise Rejected("no assistant turn", "there is nothing to learn from")
    return Chat(messages)


def _message(turn: Any, index: int, role_key: str, text_key: str, roles: Mapping[str, str]) -> Message:
    where = f"message {index + 1}"
    if not isinstance(turn, Mapping):
        raise Rejected("wrong type", f"{where} must be an object, not {_kind(turn)}")
    for key in NOT_RENDERED:
        if turn.get(key):
            raise Rejected("tool calls", f"{where} has {key}, which are not supported")
    speaker = turn.get(role_key)
    if not isinstance(speaker, str) or speaker.lower() not in roles:
        known = ", ".join(sorted(roles))
        raise Rejected("wrong role", f"{where} has the {role_key} {_short(speaker)}; known: {known}")
    role = roles[speaker.lower()]
    text = _content(turn.get(text_key), where, text_key)
    if not text.strip() and role != "system":
        raise Rejected("no content", f"{where} ({role}) is empty")
    return {"role": role, "content": _sound(text, where)}


def _content(value: Any, where: str, key: str) -> str:
    if value is None:
        raise Rejected("no content", f"{where} has no {key}, or null")
    if isinstance(value, list):
        return "".join(_part(part, where) for part in value)
    if not isinstance(value, str):
        raise Rejected("wrong type", f"{where}: {key} must be text, not {_kind(value)}")
    return value


def _part(part: Any, where: str) -> str:
    """A text part of OpenAI's list form of content."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Rejected("wrong type", f"{where} has a part that is not text")
    return text


def _text(record: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if value is None:
        raise Rejected("missing key", f"there is no {key!r}, or null")
    if not isinstance(value, str):
        raise Rejected("wrong type", f"{key!r} must be text, not {_kind(value)}")
    return value


def _sound(text: str, where: str) -> str:
    r"""JSON can write half a character (a lone `\ud83d`), which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Rejected("broken Unicode", f"{where} has a lone surrogate at character {error.start + 1}") from None
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
