"""Counts and latencies of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.benches.serving.client import Outcome, Record


@dataclass(frozen=True)
class Fault:
    """at: when something was done to the server; over: when it was whole again. Times of time.monotonic()."""

    at: float
    over: float

    def touches(self, record: Record) -> bool:
        return record.begun <= self.over and record.ended >= self.at


@dataclass(frozen=True)
class Tally:
    """How many requests ended how. struck: how many were under way at the moment of a fault; resets: connections that
    the killed process itself held, or would have taken; lost: every other request without an answer and without a
    proper error.
    """

    requests: int
    struck: int
    right: int
    errors: int
    wrong: int
    resets: int
    lost: int
    complaints: tuple[str, ...]

    @classmethod
    def of(cls, records: Sequence[Record], faults: Sequence[Fault] = (), *, cuts_connections: bool = False) -> Tally:
        """cuts_connections: whether the faults ended the process that clients are connected to."""

        def is_reset(record: Record) -> bool:
            cut = record.outcome is Outcome.CUT
            return cut and cuts_connections and any(fault.touches(record) for fault in faults)

        resets = [record for record in records if is_reset(record)]
        count = {outcome: sum(r.outcome is outcome for r in records) for outcome in Outcome}
        bad = [r for r in records if r.outcome in (Outcome.WRONG, Outcome.LOST, Outcome.CUT) and not is_reset(r)]
        return cls(
            requests=len(records),
            struck=sum(any(r.begun <= fault.at <= r.ended for fault in faults) for r in records),
            right=count[Outcome.RIGHT],
            errors=count[Outcome.ERROR],
            wrong=count[Outcome.WRONG],
            resets=len(resets),
            lost=count[Outcome.LOST] + count[Outcome.CUT] - len(resets),
            complaints=tuple(f"{r.outcome} ({'streamed' if r.stream else 'whole'}): {r.detail}" for r in bad),
        )

    def line(self) -> dict[str, Any]:
        """For a table."""
        names = ("requests", "struck", "right", "errors", "resets", "wrong", "lost")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Latency:
    """Of right answers, in seconds; TTFT: to the first text of those that streamed."""

    p50: float
    p99: float
    ttft_p50: float
    ttft_p99: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> Latency:
        right = [r for r in records if r.outcome is Outcome.RIGHT]
        whole = [r.ended - r.begun for r in right]
        first = [r.first - r.begun for r in right if r.stream and r.first is not None]
        return cls(*_percentiles(whole), *_percentiles(first))

    def line(self) -> dict[str, Any]:
        """For a table."""
        names = {"p50": "p50 s", "p99": "p99 s", "ttft_p50": "TTFT p50 s", "ttft_p99": "TTFT p99 s"}
        return {title: getattr(self, name) for name, title in names.items()}


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile; NaN where there is nothing."""
    if not seconds:
        return float("nan"), float("nan")
    median, high = np.percentile(seconds, (50, 99))
    return float(median), float(high)
