"""What an engine replica tells Prometheus: its counters as they stand (EngineStats), and histograms of what has ended.

The families carry no place: the gateway that collects them adds `replica` and `model` (see actors.gateway.exposition).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from actors.engine.events import Event, Failed, Finished
from actors.engine.loop import Engine
from actors.engine.stats import EngineStats
from actors.engine.timeline import Timeline
from actors.gateway.exposition import Told
from model.decoding import GenerationResult

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOKENS_PER_FORWARD = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 32)

Read = Callable[[EngineStats], float]
ReadBy = Callable[[EngineStats], dict[str, int]]

GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("blockcast_rows_running", "Requests that are being decoded.", lambda s: s.running),
    ("blockcast_queue_depth", "Requests in the engine that wait for a row or for pages.", lambda s: s.waiting),
    ("blockcast_pages_used", "Cache pages that live requests refer to.", lambda s: s.pages_used),
    ("blockcast_pages_cached", "Cache pages with known blocks that nobody refers to.", lambda s: s.pages_cached),
    ("blockcast_pages_free", "Cache pages that hold nothing; cached ones can be had too.", lambda s: s.pages_free),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("blockcast_committed_tokens", "Tokens whose keys and values stay in the cache.", lambda s: s.committed_tokens),
    ("blockcast_drafted_tokens", "Tokens of drafts that lossless mode verified.", lambda s: s.drafted_tokens),
    ("blockcast_accepted_tokens", "Of these: tokens that stood.", lambda s: s.accepted_tokens),
    ("blockcast_prefix_hits", "Cache pages that a new request found ready.", lambda s: s.prefix_hits),
    ("blockcast_preemptions", "Rows that lost their pages to an older one.", lambda s: s.preemptions),
    ("blockcast_round_seconds", "Seconds in rounds.", lambda s: s.round_s),
    ("blockcast_forward_seconds", "Of these: packing, the model's forwards and the choices.", lambda s: s.forward_s),
    ("blockcast_model_seconds", "Of these: the model's forwards alone.", lambda s: s.model_s),
)
COUNTERS_BY: tuple[tuple[str, str, str, ReadBy], ...] = (
    ("blockcast_rounds", "Rounds, by the phases of the rows that shared them.", "mix", lambda s: s.rounds_by_mix),
    ("blockcast_forwards", "Forwards of single rows, by their phase.", "phase", lambda s: s.forwards),
    (
        "blockcast_query_tokens",
        "Tokens that the model ran on, by the phase of their row.",
        "phase",
        lambda s: s.query_tokens_by_phase,
    ),
)


class EngineMetrics:
    """The families of one engine, in the replica of that name. `hear` every event of every request; `told` from any
    thread."""

    def __init__(self, engine: Engine, *, replica: str, model: str) -> None:
        self._engine = engine
        self._replica = replica
        self._model = model
        self._registry = CollectorRegistry()
        self._queue_wait = self._histogram("queue_wait_seconds", "From submission to the row's first pages.", SECONDS)
        self._prefill = self._histogram("prefill_seconds", "From then until the prompt was read.", SECONDS)
        self._steps = self._histogram("steps_per_block", "Denoising steps of each finished block.", STEPS)
        self._per_forward = self._histogram(
            "tokens_per_forward",
            "Tokens per denoise or commit forward (TPF) of each answer.",
            TOKENS_PER_FORWARD,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Of these: found in the prefix cache.")
        self._completion_tokens = self._counter("completion_tokens", "Tokens of finished answers.")
        self._failures = self._counter("engine_failures", "Requests that the engine could not finish.")

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"blockcast_{name}", help_, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, help_: str) -> Counter:
        return Counter(f"blockcast_{name}", help_, registry=self._registry)

    def hear(self, event: Event) -> None:
        """Count what has ended; other events pass."""
        if isinstance(event, Finished):
            self._finished(event.result)
        elif isinstance(event, Failed):
            self._failures.inc()
        if isinstance(event, Finished | Failed) and event.timeline is not None:
            self._timed(event.timeline)

    def _finished(self, result: GenerationResult) -> None:
        for steps in result.steps_per_block:
            self._steps.observe(steps)
        self._per_forward.observe(result.tokens_per_forward)
        self._prompt_tokens.inc(result.prompt_tokens)
        self._cached_tokens.inc(result.cached_tokens)
        self._completion_tokens.inc(result.completion_tokens)

    def _timed(self, timeline: Timeline) -> None:
        self._queue_wait.observe(timeline.queue_s)
        if timeline.prefill_s is not None:
            self._prefill.observe(timeline.prefill_s)

    def told(self) -> Told:
        """All families now."""
        return Told(self._replica, self._model, tuple(self._collect()))

    def _collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, help_, read in GAUGES:
            yield GaugeMetricFamily(name, help_, value=read(stats))
        yield GaugeMetricFamily(
            "blockcast_engine_progress_age_seconds",
            "Seconds since the engine last finished a round, or looked around while idle.",
            value=max(0.0, time.monotonic() - self._engine.progress_at),
        )
        for name, help_, read in COUNTERS:
            yield CounterMetricFamily(name, help_, value=read(stats))
        for name, help_, label, read_by in COUNTERS_BY:
            family = CounterMetricFamily(name, help_, labels=[label])
            for value, count in read_by(stats).items():
                family.add_metric([value], count)
            yield family
        yield from self._registry.collect()
