"""From raw answers to figures: pure functions, so that anybody can recompute the table from the raw outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Z_95 = 1.959963984540054  # two-sided 95% of the normal distribution


@dataclass(frozen=True)
class Share:
    """`correct` of `count` judged answers."""

    correct: int
    count: int

    @property
    def value(self) -> float | None:
        return self.correct / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95% interval of the share that a larger sample would show; None without a judged answer."""
        return wilson(self.correct, self.count) if self.count else None


def wilson(correct: int, count: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval (Wilson 1927) for `correct` of `count`, count at least 1. The share itself lies in it,
    which rounding alone would not grant at 0 and 1."""
    share, square = correct / count, z * z / count
    centre = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


@dataclass(frozen=True)
class Figures:
    """One contender. seconds: of its own turns; forwards: denoising and commit forwards of all its rows; losses in nats
    per supervised token, None where they were not measured."""

    label: str
    model: str
    accuracy: Share
    by_kind: Mapping[str, Share]
    questions: int
    stopped: int
    completion_tokens: int
    forwards: int
    seconds: float
    masked_loss: float | None
    next_token_loss: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        return self.completion_tokens / max(1, self.forwards)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        interval = self.accuracy.interval
        return {
            "contender": self.label,
            "model": self.model,
            "questions": self.questions,
            "judged": self.accuracy.count,
            "correct": self.accuracy.correct,
            "accuracy": self.accuracy.value,
            "accuracy_95": list(interval) if interval else None,
            "accuracy_by_kind": {kind: share.value for kind, share in self.by_kind.items()},
            "completion_tokens": self.completion_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_forward": self.tokens_per_forward,
            "ended_by_themselves": self.stopped / self.questions,
            "held_out_masked_loss": self.masked_loss,
            "held_out_next_token_loss": self.next_token_loss,
        }


def figures_of(
    label: str, model: str, answers: Sequence[Mapping[str, Any]], seconds: float, losses: Mapping[str, float] | None
) -> Figures:
    """answers: raw answers of one contender; losses: its model's, as `held_out.measure_losses` gives them."""
    kinds = dict.fromkeys(answer["kind"] for answer in answers)
    forwards = [answer["diffusion"]["forwards"] for answer in answers]
    return Figures(
        label=label,
        model=model,
        accuracy=_share(answers),
        by_kind={kind: _share(a for a in answers if a["kind"] == kind) for kind in kinds},
        questions=len(answers),
        stopped=sum(answer["finish_reason"] == "stop" for answer in answers),
        completion_tokens=sum(answer["usage"]["completion_tokens"] for answer in answers),
        forwards=sum(counts["denoise"] + counts["commit"] for counts in forwards),
        seconds=seconds,
        masked_loss=losses["masked"] if losses else None,
        next_token_loss=losses["next_token"] if losses else None,
    )


def _share(answers: Iterable[Mapping[str, Any]]) -> Share:
    judged = [answer["correct"] for answer in answers if answer["correct"] is not None]
    return Share(sum(judged), len(judged))


def told_apart(figures: Sequence[Figures]) -> list[tuple[str, str]]:
    """(better, worse) for each two contenders whose 95% intervals do not overlap."""
    return [
        (a.label, b.label)
        for a in figures
        for b in figures
        if a.accuracy.interval and b.accuracy.interval and a.accuracy.interval[0] > b.accuracy.interval[1]
    ]
