"""The nouns: a `Problem` as a kind makes it, a `Kind` with its checker, and the `Task` that others see."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HELD_OUT_SHARE = 10  # one problem in ten


@dataclass(frozen=True)
class Problem:
    """One problem of a kind.

    key: what makes it this problem and no other (numbers, items), without the wording. expected: the value a checker
    compares (number, text, list or object of plain JSON types). answer: the worked answer, as the assistant writes it.
    """

    key: tuple[Any, ...]
    prompt: str
    answer: str
    expected: Any


Make = Callable[[random.Random], Problem]
Check = Callable[[Any, str], bool]


@dataclass(frozen=True)
class Kind:
    """A family of problems: `make` draws one, `check(expected, text)` judges an answer."""

    name: str
    make: Make
    check: Check

    def task(self, problem: Problem) -> Task:
        return Task(f"{self.name}-{problem_hash(self.name, problem.key)[:12]}", self, problem)


@dataclass(frozen=True)
class Task:
    """A problem ready to be asked. `id` depends on the problem only, not on its wording, the seed or the order."""

    id: str
    family: Kind
    problem: Problem

    @property
    def kind(self) -> str:
        return self.family.name

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat so far: one user message."""
        return [{"role": "user", "content": self.problem.prompt}]

    @property
    def answer(self) -> str:
        """The worked answer."""
        return self.problem.answer

    def check(self, text: str) -> bool:
        """Whether `text` states the right value, whatever its layout."""
        return self.family.check(self.problem.expected, text)

    def chat(self) -> dict[str, Any]:
        """The training document: prompt and worked answer."""
        return {"id": self.id, "messages": [*self.messages, {"role": "assistant", "content": self.answer}]}


def problem_hash(kind: str, key: tuple[Any, ...]) -> str:
    """Hex digest of the canonical problem: of its kind and key, not of its wording."""
    return hashlib.sha256(json.dumps([kind, *key], ensure_ascii=False).encode()).hexdigest()


def split_of(kind: str, key: tuple[Any, ...]) -> str:
    """The split a problem belongs to, by its hash: about one in `HELD_OUT_SHARE` is held out."""
    return "held_out" if int(problem_hash(kind, key), 16) % HELD_OUT_SHARE == 0 else "train"
