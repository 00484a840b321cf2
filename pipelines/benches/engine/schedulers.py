"""Rival round planners, on numbers alone: what the engine is given in place of `plan_round`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actors.engine.scheduler import Demand, Grant, Planner, plan_round


class SwitchedPlanner:
    """The planner of the moment, so that all schedulers share one engine and its cache."""

    def __init__(self, current: Planner = plan_round) -> None:
        self.current = current

    def __call__(self, demands: Sequence[Demand], prefill_tokens: int) -> list[Grant]:
        return self.current(demands, prefill_tokens)


def plan_prefill_first(demands: Sequence[Demand], prefill_tokens: int) -> list[Grant]:
    """While any row has prompt left, nobody decodes and whole prompts run at once, whatever the budget."""
    prompts = [Grant(demand.id, demand.prefill_left) for demand in demands if demand.prefill_left]
    return prompts or [Grant(demand.id, demand.query_tokens) for demand in demands]


def plan_largest_phase(demands: Sequence[Demand], prefill_tokens: int) -> list[Grant]:
    """Rows of one phase only: of the one that most rows are in (of equals, the one of the oldest row)."""
    if not demands:
        return []
    phase = Counter(demand.phase for demand in demands).most_common(1)[0][0]
    return plan_round([demand for demand in demands if demand.phase == phase], prefill_tokens)


class PhasesInTurn:
    """Rows of one phase only: the phases take turns, those without rows are passed over."""

    def __init__(self) -> None:
        self._turns: list[str] = []  # least recently run first

    def __call__(self, demands: Sequence[Demand], prefill_tokens: int) -> list[Grant]:
        waiting = dict.fromkeys(demand.phase for demand in demands)
        if not waiting:
            return []
        self._turns += [phase for phase in waiting if phase not in self._turns]
        phase = next(phase for phase in self._turns if phase in waiting)
        self._turns.remove(phase)
        self._turns.append(phase)
        return plan_round([demand for demand in demands if demand.phase == phase], prefill_tokens)


MIXED = "mixed rounds"


def schedulers() -> dict[str, Planner]:
    """Ours first, then its rivals."""
    return {
        MIXED: plan_round,
        "one phase, the largest": plan_largest_phase,
        "one phase, in turn": PhasesInTurn(),
        "prefill first": plan_prefill_first,
    }
