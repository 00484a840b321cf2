"""What a terminal shows of an answer. A model's text is never markup, and cannot steer the terminal."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from actors.chat.answer import Answer

MASK = "░░"
MASKED = Style(dim=True)
NEW = Style(bold=True, color="green")
PLAIN = Style()
BELOW = 3  # lines that stay free under a long canvas


class CanvasView:
    """The canvas of an answer as it is now, for rich's Live: the last lines where it is longer than the terminal."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = canvas_text(self._answer).wrap(console, options.max_width)
        yield from lines[-max(1, console.height - BELOW) :]


def canvas_text(answer: Answer) -> Text:
    """Decided tokens as text, the newest ones marked, and a mask for every other position."""
    shown = Text()
    for piece, style in _pieces(answer):
        shown.append(printable(piece), style)
    return shown


def _pieces(answer: Answer) -> Iterator[tuple[str, Style]]:
    """Text by position. A character whose bytes lie in several tokens shows when they stand side by side."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for position in range(answer.length):
        cell = answer.cells.get(position)
        if cell is None:
            yield decoder.decode(b"", final=True), PLAIN
            yield MASK, MASKED
        else:
            yield decoder.decode(cell.data), NEW if cell.step == answer.steps else PLAIN
    yield decoder.decode(b"", final=True), PLAIN


def printable(text: str) -> str:
    """The text with its control characters spelt out, line breaks and tabs aside."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)
