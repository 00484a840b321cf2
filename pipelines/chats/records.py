"""One parsed JSON object (or Parquet row) as a chat: five shapes of records, one parser each.

| format            | record                                                                                       |
|-------------------|----------------------------------------------------------------------------------------------|
| messages          | {"messages": [{"role", "content"}, ...]}                                                     |
| sharegpt          | {"conversations": [{"from", "value"}, ...], "system"?}                                       |
| alpaca            | {"instruction", "input"?, "output", "system"?}                                               |
| prompt_completion | {"prompt", "completion"}, also {"question", "answer"} and {"prompt", "response"}             |
| text              | {"text"}: plain text without turns, all of it supervised                                     |

Keys whose value is null count as absent. Other keys of a record are not read. Anything a template could not render
faithfully (an unknown role, content that is no text) is rejected, with the reason. A record of messages may declare
"tools", its messages may call them: pipelines/chats/tools.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.chats.refusal import Rejected, kind_of, sound
from pipelines.chats.tools import KIND as TOOL_CALLS
from pipelines.chats.tools import calls, definitions, name_of

Message = dict[str, Any]  # role and content are text; of tools: tool_calls, name, tool_call_id

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SPEAKERS = {
    **ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "observation": "tool",
}  # fmt: skip
PAIRS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"))
KEYS = frozenset({"messages", "tools", "conversations", "system", "instruction", "input", "output", "text"}).union(
    *PAIRS
)
"""What is read of a record."""


@dataclass(frozen=True)
class Chat:
    """Messages with role (system, user, assistant, tool) and content; at least one of them the assistant's. tools: the
    definitions it declares."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def turns(self) -> int:
        return len(self.messages)

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def tool_names(self) -> list[str]:
        return [name_of(tool) for tool in self.tools]


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
        raise Rejected("not an object", f"a line must hold a JSON object, not {kind_of(record)}")
    return PARSERS[format]({key: value for key, value in record.items() if value is not None})


def detect(records: Iterable[Any]) -> str | None:
    """The format most of the records have, the first in the table's order when tied; None when none fits any."""
    votes: Counter[str] = Counter()
    for record in records:
        if isinstance(record, Mapping):
            votes.update(name for name, fits in _FITS.items() if fits(record))
    return max(_FITS, key=lambda name: votes[name]) if votes else None


def called_names(message: Message) -> list[str]:
    """The tools that a message calls."""
    return [name_of(call) for call in message.get("tool_calls", ())]


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
    chat = _chat(_turns(record, "messages"), "role", "content", ROLES)
    return Chat(chat.messages, definitions(record.get("tools")))


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
    return PlainText(sound(text, "text"))


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
        raise Rejected("wrong type", f"{key!r} must be a list, not {kind_of(turns)}")
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
        raise Rejected("wrong type", f"{where} must be an object, not {kind_of(turn)}")
    speaker = turn.get(role_key)
    if not isinstance(speaker, str) or speaker.lower() not in roles:
        known = ", ".join(sorted(roles))
        raise Rejected("wrong role", f"{where} has the {role_key} {_short(speaker)}; known: {known}")
    role = roles[speaker.lower()]
    if turn.get("function_call"):
        raise Rejected(TOOL_CALLS, f"{where} has function_call, which OpenAI gave up: write it as tool_calls")
    called = calls(turn["tool_calls"], where) if turn.get("tool_calls") else []
    if called and role != "assistant":
        raise Rejected(TOOL_CALLS, f"{where} ({role}) has tool_calls, which are the assistant's")
    text = _content("" if called and turn.get(text_key) is None else turn.get(text_key), where, text_key)
    if not text.strip() and role != "system" and not called:
        raise Rejected("no content", f"{where} ({role}) is empty")
    message: Message = {"role": role, "content": sound(text, where)}
    if called:
        message["tool_calls"] = called
    if role == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    return message


def _content(value: Any, where: str, key: str) -> str:
    if value is None:
        raise Rejected("no content", f"{where} has no {key}, or null")
    if isinstance(value, list):
        return "".join(_part(part, where) for part in value)
    if not isinstance(value, str):
        raise Rejected("wrong type", f"{where}: {key} must be text, not {kind_of(value)}")
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
        raise Rejected("wrong type", f"{key!r} must be text, not {kind_of(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
