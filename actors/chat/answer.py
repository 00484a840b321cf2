"""What is known of one answer while it is written: which position holds which token, the final text, the figures."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from actors.chat.client import Event

PART = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")  # how the server writes a token that is a part of a character


@dataclass(frozen=True)
class Cell:
    """A decided position: the bytes of its token, and the 1-based forward that decided it."""

    data: bytes
    step: int


@dataclass
class Answer:
    """One answer. Positions count from its first token; `length` of them are on the canvas, masked or not.

    steps: forwards that decided something; figures and usage: the server's own, once the answer is complete.
    """

    cells: dict[int, Cell] = field(default_factory=dict)
    length: int = 0
    steps: int = 0
    text: str = ""
    figures: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    begun: float = field(default_factory=time.monotonic)
    first_text_s: float | None = None
    last_s: float = 0.0

    def take(self, event: Event) -> None:
        """Take in an event of the stream."""
        if event.name == "canvas":
            self._reveal(event.data)
        elif not event.name:
            self._chunk(event.data)

    def _reveal(self, data: dict[str, Any]) -> None:
        self.steps += 1
        self.last_s = time.monotonic() - self.begun
        start = data["prompt_tokens"]
        self.length = max(self.length, data["block_start"] + data["block_size"] - start)
        for reveal in data["reveals"]:
            self.cells[reveal["position"] - start] = Cell(token_data(reveal["text"]), self.steps)

    def _chunk(self, data: dict[str, Any]) -> None:
        for choice in data["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece:
                self.text += piece
                self.last_s = time.monotonic() - self.begun
                if self.first_text_s is None:
                    self.first_text_s = self.last_s
        self.figures = data.get("diffusion") or self.figures
        self.usage = data.get("usage") or self.usage

    @property
    def summary(self) -> str:
        """One line of figures; empty while the answer is not complete."""
        if self.figures is None or self.usage is None:
            return ""
        tokens, forwards = self.usage["completion_tokens"], self.figures["forwards"]
        parts = [
            f"{tokens} tokens after a prompt of {self.usage['prompt_tokens']}",
            f"{forwards['denoise'] + forwards['commit']} forwards ({self.figures['mode']})",
            f"{self.figures['tokens_per_forward']:.2f} tokens per forward",
        ]
        if self.last_s:
            parts.append(f"{tokens / self.last_s:.1f} tokens/s")
        if self.first_text_s is not None:
            parts.append(f"first text after {self.first_text_s:.2f} s")
        return ", ".join(parts)


def token_data(text: str) -> bytes:
    """The bytes of a token from its text in a canvas event."""
    part = PART.fullmatch(text)
    return bytes.fromhex(part[1].replace("\\x", "")) if part else text.encode()
