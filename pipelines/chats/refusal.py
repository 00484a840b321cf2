"""Why a record cannot be used."""

from __future__ import annotations

from typing import Any


class Rejected(Exception):
    """A record that cannot be used. kind: the class it is counted under; the full reason is `kind: detail`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def sound(text: str, where: str) -> str:
    r"""The text itself. JSON can write half a character (a lone `\ud83d`), which no tokenizer can read: Rejected."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Rejected("broken Unicode", f"{where} has a lone surrogate at character {error.start + 1}") from None
    return text
