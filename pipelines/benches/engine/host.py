"""The host's share: how much of a round is not spent in the model, with all rows at work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from pipelines.assessment.contenders import AR
from pipelines.benches.engine.closed import BLOCKS, contestants_at
from pipelines.benches.engine.contestants import AR_NAME, EngineContestant
from pipelines.benches.engine.setting import PartResult, Setting
from pipelines.benches.timing import take_turns


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of the average round of one run: all of it, the decoder's step, the model's forward."""

    round_ms: float
    step_ms: float
    model_ms: float


@dataclass
class Clocked:
    """A contestant, and the engine's own clocks over each of its runs."""

    contestant: EngineContestant
    rounds: list[RoundTime]

    def run(self) -> None:
        before = self.contestant.engine.stats()
        self.contestant.run()
        after = self.contestant.engine.stats()
        each = 1000 / (after.rounds - before.rounds)
        self.rounds.append(
            RoundTime(
                each * (after.round_s - before.round_s),
                each * (after.forward_s - before.forward_s),
                each * (after.model_s - before.model_s),
            )
        )


def measure_host(setting: Setting) -> PartResult:
    """AR and blocks, `batch` rows at a time."""
    batch = setting.config.batch
    runs = contestants_at(setting, batch, {AR_NAME: AR, BLOCKS: setting.blocks})
    clocked = {name: Clocked(contestant, []) for name, contestant in runs.items()}
    for one in clocked.values():  # warm-up, not kept
        one.contestant.run()
    forms = {name: partial(Clocked.run, one) for name, one in clocked.items()}
    take_turns(forms, setting.config.rounds, warm_up=0, title="engine: host")
    ratios = {
        f"round over model time, {name}, batch {batch}": median(r.round_ms / r.model_ms for r in one.rounds)
        for name, one in clocked.items()
    }
    return PartResult([_line(batch, name, one) for name, one in clocked.items()], ratios)


def _line(batch: int, name: str, one: Clocked) -> dict[str, Any]:
    return {
        "part": "host",
        "batch": batch,
        "decoder": name,
        "round ms": median(r.round_ms for r in one.rounds),
        "step ms": median(r.step_ms for r in one.rounds),
        "model ms": median(r.model_ms for r in one.rounds),
        "host share": median(1 - r.model_ms / r.round_ms for r in one.rounds),
    }
