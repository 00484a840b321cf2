"""The learning rate as a function of the step: a linear warm-up, then one of three ways down, or none.

constant   /----------      as published
cosine     /""--..__        half a cosine over all that is left
wsd        /-------\\        stable, then a straight line down over the last share of the steps (warm-up, stable,
                            decay): a run may be cut short or prolonged before the decay begins
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("cosine", "constant", "wsd")


@dataclass(frozen=True)
class Schedule:
    """kind: one of SCHEDULES. final_share: of the highest rate, where cosine and wsd end. decay_share: of all steps."""

    kind: str
    highest: float
    steps: int
    warmup_steps: int
    final_share: float
    decay_share: float

    def rate(self, step: int) -> float:
        """The rate of a 0-based step."""
        if step < self.warmup_steps:
            return self.highest * (step + 1) / self.warmup_steps
        return self.highest * (self.final_share + (1 - self.final_share) * self._height(step))

    def _height(self, step: int) -> float:
        """From 1, the highest rate, to 0, its final share."""
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * _progress(step, self.warmup_steps, self.steps)))
        if self.kind == "wsd":
            begin = max(self.warmup_steps, round(self.steps * (1 - self.decay_share)))
            return 1 - _progress(step, begin, self.steps)
        return 1.0


def _progress(step: int, begin: int, end: int) -> float:
    return max(step - begin, 0) / max(end - begin, 1)
