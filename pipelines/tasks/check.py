"""Checkers: `check(expected, text) -> bool`, exact in the value and lenient in the layout.

Most answers end with a line `Answer: VALUE`; the last such line counts. Structured answers are found by their own form:
the last JSON object, the `Key: value` lines, the last line as CSV.
"""

from __future__ import annotations

import csv
import json
import re
from fractions import Fraction
from typing import Any

_ANSWER = re.compile(r"answer\W{0,3}?[:=]", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LONGEST_NUMBER = 40  # characters; longer ones are never right and slow to read
_QUOTES = " \t\r*_`'\"“”‘’"


def final_answer(text: str) -> str | None:
    """What stands behind the last `Answer:`, without quotes, markup and the closing full stop; None without one."""
    ends = [found.end() for found in _ANSWER.finditer(text)]
    if not ends:
        return None
    lines = (line.strip(_QUOTES) for line in text[ends[-1] :].splitlines())
    return next((line.rstrip(".").strip(_QUOTES) for line in lines if line), None)


def number(expected: int, text: str) -> bool:
    """The answer line holds exactly one number and it equals `expected`; units and thousands commas are ignored."""
    answer = final_answer(text)
    numbers = _NUMBER.findall(answer) if answer else []
    if len(numbers) != 1 or len(numbers[0]) > _LONGEST_NUMBER:
        return False
    return Fraction(numbers[0].replace(",", "")) == expected


def exact(expected: str, text: str) -> bool:
    """The answer line equals `expected`, in capitals as asked; runs of spaces count as one."""
    answer = final_answer(text)
    return answer is not None and " ".join(answer.split()) == expected


def same_text(expected: str, text: str) -> bool:
    """As `exact`, but capital or small letters do not matter."""
    answer = final_answer(text)
    return answer is not None and " ".join(answer.split()).casefold() == expected.casefold()


def letters(expected: str, text: str) -> bool:
    """The answer line spells `expected`; spaces, commas and hyphens between the letters do not matter."""
    answer = final_answer(text)
    return answer is not None and re.sub(r"[\s,\-]", "", answer).casefold() == expected.casefold()


def items(expected: list[str], text: str) -> bool:
    """The answer line is the list `expected`, separated by commas, in that order; brackets do not matter."""
    answer = final_answer(text)
    if answer is None:
        return False
    found = [item.strip(_QUOTES) for item in answer.strip("[](){}").split(",")]
    return [item.casefold() for item in found] == [item.casefold() for item in expected]


def json_object(expected: dict[str, Any], text: str) -> bool:
    """The last JSON object in the text equals `expected` in keys and values; a number is not its text."""
    found = _last_object(text)
    return found is not None and _plain(found) == _plain(expected)


def key_values(expected: dict[str, str], text: str) -> bool:
    """The `Key: value` lines of the text are those of `expected`, in any order and nothing more."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.strip(_QUOTES + "-").partition(":")
        if colon and value.strip(_QUOTES):
            found[key.strip(_QUOTES).casefold()] = value.strip(_QUOTES).rstrip(".")
    return found == {key.casefold(): value for key, value in expected.items()}


def csv_line(expected: list[str], text: str) -> bool:
    """The last line of the text, read as CSV, holds the fields `expected`."""
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("```")]
    if not lines:
        return False
    try:
        fields = next(csv.reader([lines[-1].strip()], skipinitialspace=True))
    except csv.Error:
        return False
    return [field.strip() for field in fields] == expected


def _last_object(text: str) -> dict[str, Any] | None:
    decoder, found, start = json.JSONDecoder(), None, text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            found = value
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def _plain(value: Any) -> Any:
    """Values tagged by type, so that 1, "1" and true differ while 1 and 1.0 do not."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return ("number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__, value)
