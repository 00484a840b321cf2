"""Fair timing: the forms to compare take turns, each ratio is taken within one turn, medians stand for all turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch


@dataclass
class Times:
    """Seconds of each form, one entry a round, in the same order."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times faster `fast` is: the median over rounds of the ratio within a round."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return median(one / other for one, other in pairs)


def take_turns(forms: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: int = 1, title: str = "") -> Times:
    """Run every form once a round, the order turning by one each round; `warm_up` first rounds are not kept."""
    times = Times({name: [] for name in forms})
    names = list(forms)
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            seconds = timed(forms[name])
            if number >= 0:
                times.seconds[name].append(seconds)
        if title:
            print(f"bench: {title}: {'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}", file=sys.stderr)
    return times


def timed(form: Callable[[], object]) -> float:
    """Seconds of one call, until the device has finished."""
    started = time.perf_counter()
    form()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
