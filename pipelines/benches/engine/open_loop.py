"""An open loop: requests arrive at random times and do not wait for each other; time to the first token, gaps.

Short chats and long prompts arrive in a Poisson stream, at a share of what the engine sustains when they are all there
at once. Every scheduler gets the same stream in the same engine. TTFT counts from the time a request should arrive.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from actors.engine.events import Delta, Event, Failed, Finished
from actors.engine.loop import Engine
from actors.engine.scheduler import Planner
from actors.engine.together import generate_all
from model.decoding import GenerationRequest
from model.errors import JobError
from pipelines.benches.engine.contestants import share_equal
from pipelines.benches.engine.schedulers import MIXED, SwitchedPlanner, schedulers
from pipelines.benches.engine.setting import PartResult, Setting
from pipelines.benches.timing import take_turns, timed


@dataclass(frozen=True)
class Arrival:
    """A request and when it arrives, seconds after the start."""

    at: float
    request: GenerationRequest


@dataclass
class Served:
    """What came of an arrival. deltas: seconds after the start at which new tokens were there."""

    arrival: Arrival
    deltas: list[float] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()

    @property
    def ttft(self) -> float:
        return self.deltas[0] - self.arrival.at


@dataclass(frozen=True)
class Figures:
    """Of one open loop. Seconds; tokens/s from the start to the last answer's end."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p95: float
    gap_p95: float

    @classmethod
    def of(cls, served: Sequence[Served]) -> Figures:
        first = [one.ttft for one in served]
        gaps = [b - a for one in served for a, b in zip(one.deltas, one.deltas[1:], strict=False)]
        tokens = sum(len(one.token_ids) for one in served)
        return cls(
            tokens_per_s=tokens / max(one.deltas[-1] for one in served),
            ttft_p50=float(np.percentile(first, 50)),
            ttft_p95=float(np.percentile(first, 95)),
            gap_p95=float(np.percentile(gaps or [0.0], 95)),
        )


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> list[Served]:
    """Submit each request at its time and drive the engine from this thread until all have their answers."""
    served = {arrival.request.id: Served(arrival) for arrival in arrivals}
    started = time.perf_counter()

    def listen(event: Event) -> None:
        if isinstance(event, Failed):
            raise JobError(f"Request {event.id!r} failed: {event.message}")
        one = served[event.id]
        if isinstance(event, Delta) and event.token_ids:
            one.deltas.append(time.perf_counter() - started)
        elif isinstance(event, Finished):
            one.token_ids = event.result.token_ids

    coming = list(arrivals)
    while True:
        while coming and coming[0].at <= time.perf_counter() - started:
            engine.submit(coming.pop(0).request, listen)
        if not engine.step():
            if not coming:
                return list(served.values())
            time.sleep(max(0.0, coming[0].at - (time.perf_counter() - started)))


@dataclass
class OpenLoop:
    """One scheduler under the stream of arrivals."""

    engine: Engine
    switch: SwitchedPlanner
    planner: Planner
    arrivals: Sequence[Arrival]
    rounds: list[Figures] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def run(self) -> None:
        self.switch.current = self.planner
        served = serve(self.engine, self.arrivals)
        self.rounds.append(Figures.of(served))
        self.answers = [one.token_ids for one in served]

    def median(self, name: str) -> float:
        return median(getattr(figures, name) for figures in self.rounds)


def measure_open(setting: Setting) -> PartResult:
    """All schedulers. Raises JobError where an answer depends on the scheduler though it must not."""
    requests = mixed_requests(setting)
    switch = SwitchedPlanner()
    engine = setting.engine(requests, setting.config.batch, planner=switch)
    generate_all(engine, requests)  # warm-up
    capacity = len(requests) / timed(lambda: generate_all(engine, requests))
    arrivals = poisson(requests, setting.config.load * capacity, setting.config.seed)
    loops = {name: OpenLoop(engine, switch, planner, arrivals) for name, planner in schedulers().items()}
    forms = {name: partial(OpenLoop.run, loop) for name, loop in loops.items()}
    take_turns(forms, setting.config.rounds, warm_up=0, title="engine: open")
    return PartResult(_lines(setting, loops, capacity), _ratios(loops))


def mixed_requests(setting: Setting) -> list[GenerationRequest]:
    """Held-out tasks; a share of them, spread evenly, behind a long text."""
    config = setting.config
    requests = setting.requests(setting.blocks, config.arrivals)
    random = np.random.default_rng(config.seed)
    long = [int((i + 1) * config.long_share) > int(i * config.long_share) for i in range(len(requests))]
    lengths = random.integers(config.long_prompt[0], config.long_prompt[1] + 1, sum(long)).tolist()
    behind = iter(setting.behind_text([r for r, is_long in zip(requests, long, strict=True) if is_long], lengths))
    return [next(behind) if is_long else request for request, is_long in zip(requests, long, strict=True)]


def poisson(requests: Sequence[GenerationRequest], rate: float, seed: int) -> list[Arrival]:
    """`rate` arrivals a second on average, in the order of the requests."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))
    return [Arrival(float(at), request) for at, request in zip(np.cumsum(gaps), requests, strict=True)]


def _lines(setting: Setting, loops: dict[str, OpenLoop], capacity: float) -> list[dict[str, Any]]:
    ours = loops[MIXED].answers
    lines = []
    for name, loop in loops.items():
        equal = share_equal(loop.answers, ours)
        if setting.exact and equal < 1:
            raise JobError(f"open: {1 - equal:.0%} of the answers differ between `{name}` and `{MIXED}`.")
        lines.append(
            {
                "part": "open",
                "batch": setting.config.batch,
                "decoder": name,
                "arrivals/s": setting.config.load * capacity,
                "tokens/s": loop.median("tokens_per_s"),
                "TTFT p50 s": loop.median("ttft_p50"),
                "TTFT p95 s": loop.median("ttft_p95"),
                "gap p95 s": loop.median("gap_p95"),
                "equal to mixed": equal,
            }
        )
    return lines


def _ratios(loops: dict[str, OpenLoop]) -> dict[str, float]:
    """Theirs over ours within a round, the median of the rounds: more than 1 where ours answers sooner."""
    ratios = {}
    for name in list(loops)[1:]:
        pairs = list(zip(loops[name].rounds, loops[MIXED].rounds, strict=True))
        ratios[f"p95 TTFT, {name} over {MIXED}"] = median(a.ttft_p95 / b.ttft_p95 for a, b in pairs)
        if all(b.gap_p95 > 0 for _, b in pairs):  # answers of one delta have no gaps
            ratios[f"p95 gap, {name} over {MIXED}"] = median(a.gap_p95 / b.gap_p95 for a, b in pairs)
        ratios[f"throughput, {name} over {MIXED}"] = median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)
    return ratios
