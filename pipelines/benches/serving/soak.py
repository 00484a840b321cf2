"""Minutes of load at a share of what the service can do: is memory flat, are answers right, how late is the last one.

Many short requests come first: until some thousands of requests have passed, caches and heaps still grow to their size.
Then the capacity is measured, with as many clients as the engines have rows, each asking again at once; then requests
arrive at random times at a share of that rate. Resident memory of gateway, proxy, replicas and controller is sampled
all the while; its slope is taken after a warm-up, and is flat when it is within its own noise.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from model.errors import JobError
from pipelines.benches.result import Result, machine
from pipelines.benches.serving.client import Outcome, Target
from pipelines.benches.serving.load import Load
from pipelines.benches.serving.memory import ROLES, MemoryWatch
from pipelines.benches.serving.questions import Question, learn
from pipelines.benches.serving.service import Service
from pipelines.benches.serving.setting import ServingBenchConfig, check_threads, make_questions, serve_args, source_of
from pipelines.benches.serving.tally import Latency, Tally

MINUTE = 60.0


class SoakBenchConfig(ServingBenchConfig):
    """Load a service for a long time at a share of its capacity and watch memory and latency."""

    output_name: ClassVar[str] = "bench/soak.json"

    minutes: float = Field(30.0, gt=0, description="length of the soak")
    share: float = Field(0.8, gt=0, lt=1, description="rate of arrivals, a share of the capacity")
    replicas: int = Field(1, ge=1, description="engine replicas")
    warm_requests: int = Field(
        12_000, ge=0, description="requests of one token before the rest: heaps and caches reach their size"
    )
    pages: int | None = Field(
        None,
        ge=1,
        description="pages of a replica's cache, one block each; null: the engine's default. Memory grows until all "
        "have been used once, which few pages are soon",
    )
    calibrate_s: float = Field(30.0, gt=0, description="seconds in which the capacity is measured")
    warm_share: float = Field(0.2, ge=0, lt=1, description="share of the soak before memory's slope is taken")
    sample_s: float = Field(5.0, gt=0, description="seconds between two samples of memory")


def run_soak(config: SoakBenchConfig) -> Result:
    """Measure. Raises JobError where an answer was wrong or a request lost."""
    cores = len(os.sched_getaffinity(0))
    check_threads(config, config.replicas, cores)
    source, name = source_of(config)
    args = serve_args(config, source, replicas=config.replicas)
    args["engine"]["pages"] = config.pages
    with Service(args, cpus=max(cores, config.threads * config.replicas)) as service:
        questions = make_questions(config)
        warm_up(config, Target(service.url), questions)
        questions = learn(Target(service.url), questions, distinct=False)
        lines = soak(config, service, questions)
    note = (
        f"{name}, {config.minutes:g} minutes at {config.share:.0%} of the capacity, {config.replicas} replica"
        f"{'' if config.replicas == 1 else 's'} of {config.rows} rows, answers of at most {config.max_tokens} tokens, "
        f"half of them streamed; memory after {config.warm_requests:,} requests of one token and the first "
        f"{config.warm_share:.0%}, noise: two standard errors."
    )
    return Result("soak", machine("float32"), 1, lines, {}, note)


def warm_up(config: SoakBenchConfig, target: Target, questions: Sequence[Question]) -> Tally:
    """Ask for one token each, as many at once as the engines have rows. Raises JobError where an answer is wrong."""
    short = [Question(question.path, {**question.fields, "max_tokens": 1}) for question in questions]
    short = learn(target, short, distinct=False)
    with Load(target, short, clients=config.rows * config.replicas, limit=config.warm_requests) as load:
        load.wait()
    return _refuse_wrong(load)


def soak(config: SoakBenchConfig, service: Service, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The table, of a running service whose answers to the questions are known."""
    target = Target(service.url)
    capacity = measure_capacity(config, target, questions)
    print(f"bench: soak: capacity {capacity:.2f} requests/s", file=sys.stderr)
    load = Load(target, questions, rate=config.share * capacity, seed=config.seed)
    with MemoryWatch(service, config.sample_s) as memory:
        begun = time.monotonic()
        with load:
            time.sleep(config.minutes * MINUTE)
    return _load_lines(config, load, capacity) + _memory_lines(config, memory, begun)


def measure_capacity(config: SoakBenchConfig, target: Target, questions: Sequence[Question]) -> float:
    """Requests/s of a closed loop that keeps every row busy."""
    clients = config.rows * config.replicas
    with Load(target, questions, clients=clients) as load:
        load.await_right(clients, time.monotonic(), config.calibrate_s + target.patience_s)  # warm-up
        begun = time.monotonic()
        time.sleep(config.calibrate_s)
        ended = time.monotonic()
    right = sum(r.outcome is Outcome.RIGHT and begun <= r.ended < ended for r in load.records)
    if not right:
        raise JobError(f"soak: no answer in {config.calibrate_s:g} s: give --calibrate_s more.")
    return right / (ended - begun)


def _load_lines(config: SoakBenchConfig, load: Load, capacity: float) -> list[dict[str, Any]]:
    tally = _refuse_wrong(load)
    rate = config.share * capacity
    first = {"part": "load", "capacity/s": capacity, "arrivals/s": rate}
    counts = {name: count for name, count in tally.line().items() if name not in ("struck", "resets")}
    return [{**first, **counts, **Latency.of(load.records).line()}]


def _refuse_wrong(load: Load) -> Tally:
    tally = Tally.of(load.records)
    if tally.wrong or tally.lost:
        raise JobError(f"soak: {tally.wrong} wrong answers and {tally.lost} lost: {tally.complaints[0]}")
    return tally


def _memory_lines(config: SoakBenchConfig, memory: MemoryWatch, begun: float) -> list[dict[str, Any]]:
    since = begun + config.warm_share * config.minutes * MINUTE
    lines = []
    for role in ROLES:
        slope, mib = memory.slope(role, since), memory.mib[role]
        figures = {"first MiB": mib[0], "last MiB": mib[-1], "most MiB": max(mib)}
        hourly = {"MiB/hour": slope.per_hour, "noise": slope.noise, "within noise": "yes" if slope.flat else "no"}
        lines.append({"part": "memory", "process": role, **figures, **hourly})
    return lines
