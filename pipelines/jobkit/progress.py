"""Progress of a long job: a bar on a terminal, plain lines (at most one every few seconds) elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_EVERY_S = 5.0


def figures_text(figures: dict[str, float | str]) -> str:
    """`loss 1.234, tokens/s 75.2`: names spelled as given, numbers to four significant digits."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def duration_text(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """`with Progress("adapt", total=100, unit="steps") as progress: progress.update(3, loss=1.2)`; writes to stderr.

    already: how much an earlier run had finished; the time left is reckoned from this run's pace only.
    """

    def __init__(self, title: str, *, total: int, unit: str, already: int = 0, console: Console | None = None) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.already = self.completed = already
        self._console = console or Console(file=sys.stderr)
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._bar: RichProgress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self._bar = RichProgress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.completed, figures="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1, **figures: float | str) -> None:
        """`count` more units are done."""
        self.update(self.completed + count, **figures)

    def update(self, completed: int, **figures: float | str) -> None:
        """`completed` units are done in all; figures such as loss stand beside the bar."""
        self.completed = completed
        text = figures_text(figures)
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, figures=text)
        elif completed >= self.total or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._line(text)

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        left = self.seconds_left()
        ending = f", {duration_text(left)} left" if left is not None and self.completed < self.total else ""
        figures = f", {text}" if text else ""
        print(
            f"{self.title}: {self.completed}/{self.total} {self.unit}{figures}{ending}",
            file=self._console.file,
            flush=True,
        )

    def seconds_left(self) -> float | None:
        """From the pace of this run so far; None before anything was done."""
        done = self.completed - self.already
        if done <= 0:
            return None
        return (time.monotonic() - self._started) / done * (self.total - self.completed)
