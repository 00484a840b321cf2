"""Mode "auto": blocks or token by token, whichever answers sooner at this load. Numbers only: no torch, no Ray.

A round of R rows that write blocks of K runs R x K query tokens for about R x TPF answer tokens; token by token it
runs R tokens for R. Where forwards are bound by memory (few rows, GPUs) the wide round costs hardly more, blocks win;
where they are bound by arithmetic (many rows on a CPU) token by token wins. So the choice needs what rounds cost here,
which is measured once (`actors.engine.calibration`), and how many tokens a forward decides, learnt from finished
answers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

PRIOR_TPF = 2.0  # tokens per forward before any answer has been seen
MEMORY = 0.9  # weight of what was learnt before, when an answer ends


@dataclass(frozen=True)
class RoundCosts:
    """Seconds a round by the number of rows in it: all token by token (`ar`), or all in blocks (`diffusion`)."""

    ar: Mapping[int, float]
    diffusion: Mapping[int, float]

    def __post_init__(self) -> None:
        assert self.ar and self.ar.keys() == self.diffusion.keys(), "both modes are measured at the same rows"


@dataclass
class ModeChooser:
    """Chooses for one engine. Not thread-safe: it belongs to the engine's thread."""

    costs: RoundCosts
    tokens_per_forward: float = field(default=PRIOR_TPF, init=False)

    def choose(self, max_tokens: int, rows: int) -> str:
        """The mode for an answer of at most max_tokens tokens, with `rows` rows at work, this one included.

        An answer of n tokens needs n forwards token by token; in blocks n / TPF, and one at least.
        """
        forwards = max(1.0, max_tokens / self.tokens_per_forward)
        blocks = forwards * interpolate(self.costs.diffusion, rows)
        single = max_tokens * interpolate(self.costs.ar, rows)
        return "diffusion" if blocks < single else "ar"

    def learn(self, completion_tokens: int, forwards: int) -> None:
        """An answer in blocks ended after so many denoising and commit forwards."""
        if forwards:
            seen = completion_tokens / forwards
            self.tokens_per_forward = MEMORY * self.tokens_per_forward + (1 - MEMORY) * seen


def interpolate(costs: Mapping[int, float], rows: int) -> float:
    """Seconds at `rows`, linear between the measured numbers of rows, proportional beyond the last."""
    known = sorted(costs)
    at = bisect_left(known, rows)
    if at == len(known):
        return costs[known[-1]] * rows / known[-1]
    if known[at] == rows or at == 0:
        return costs[known[at]]
    low, high = known[at - 1], known[at]
    share = (rows - low) / (high - low)
    return (1 - share) * costs[low] + share * costs[high]


def calibration_rows(max_rows: int) -> list[int]:
    """Numbers of rows worth measuring: powers of two, and max_rows itself."""
    return sorted({2**i for i in range(int(math.log2(max_rows)) + 1)} | {max_rows})
