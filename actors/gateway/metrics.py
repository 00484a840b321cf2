"""What a gateway tells Prometheus: its own view of every request, and the engines' families beside it.

    metrics = GatewayMetrics("gateway-1", "model", inside=..., limit=admission.limit, retries=...)
    families = await Scraper(metrics, ask_engines).scrape()

Outcomes and error kinds start at 0, so that a first error is an increase and not a new series.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from actors.gateway.exposition import Families, Scrape, Told, merge

ENDPOINTS = ("chat", "completion")
OUTCOMES = ("stop", "length", "left", "refused", "overloaded", "deadline", "failed")
KINDS = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "slow_body",
    413: "too_large",
    415: "content_type",
    429: "overloaded",
    500: "engine",
    503: "unavailable",
    504: "deadline",
}
INTERNAL = "internal"
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
GAP = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
FORGET_S = 120.0  # a replica that has not answered for so long is no longer told as down

Outcome = Literal["stop", "length", "left", "refused", "overloaded", "deadline", "failed"]
Ask = Callable[[], Awaitable[Scrape]]


class GatewayMetrics:
    """One gateway's families. replica: its name; inside: how many requests it holds now, of at most `limit`; retries:
    how many runs of its requests were begun again so far."""

    def __init__(
        self, replica: str, model: str, *, inside: Callable[[], int], limit: int, retries: Callable[[], int]
    ) -> None:
        self.replica = replica
        self.model = model
        self._retries = retries
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "blockcast_requests",
            "Requests that ended, by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=self._registry,
        )
        self._errors = Counter("blockcast_errors", "Errors by kind.", ["kind"], registry=self._registry)
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first final tokens.", FIRST_TOKEN
        )
        self._gap = self._histogram("delta_gap_seconds", "Between two pieces of final text of one answer.", GAP)
        self._whole = self._histogram("request_seconds", "From arrival to the end of a finished answer.", WHOLE)
        self._gauge("gateway_requests", "Requests in the gateway, running and waiting.").set_function(inside)
        self._gauge("gateway_requests_limit", "At so many the next request gets a 429.").set(limit)
        for endpoint in ENDPOINTS:
            for outcome in OUTCOMES:
                self._requests.labels(endpoint, outcome)
        for kind in (*KINDS.values(), INTERNAL):
            self._errors.labels(kind)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"blockcast_{name}", help_, buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, help_: str) -> Gauge:
        return Gauge(f"blockcast_{name}", help_, registry=self._registry)

    # ------------------------------------------------------------------------------------------- one request
    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def error(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def ended(self, endpoint: str, outcome: Outcome, seconds: float) -> None:
        """A request has ended; only a whole answer's time tells how fast answers are."""
        self._requests.labels(endpoint, outcome).inc()
        if outcome in ("stop", "length"):
            self._whole.observe(seconds)

    # ------------------------------------------------------------------------------------------- all of them
    def told(self) -> Told:
        """This gateway's families now."""
        retries = CounterMetricFamily(
            "blockcast_retries", "Runs that were begun again on another engine.", value=self._retries()
        )
        return Told(self.replica, self.model, (*self._registry.collect(), retries))


class Scraper:
    """Everything one GET /metrics answers. ask_engines, ask_gateways: all replicas' families, within bounded time;
    without ask_gateways this gateway is the only one."""

    def __init__(self, own: GatewayMetrics, ask_engines: Ask, ask_gateways: Ask | None = None) -> None:
        self._own = own
        self._ask_engines = ask_engines
        self._ask_gateways = ask_gateways
        self._seen_at: dict[str, float] = {}  # engine replicas that ever answered, by name

    async def scrape(self) -> Families:
        """The whole application's families."""
        engines, gateways = await asyncio.gather(self._ask_engines(), self._gateways())
        return merge([*gateways, *engines.told, *self._up(engines)])

    async def _gateways(self) -> list[Told]:
        others = await self._ask_gateways() if self._ask_gateways else Scrape()
        return [self._own.told(), *(told for told in others.told if told.replica != self._own.replica)]

    def _up(self, engines: Scrape) -> list[Told]:
        """blockcast_replica_up of each engine replica, and how many were silent, which may have no known name yet."""
        now = time.monotonic()
        answered = {told.replica for told in engines.told}
        self._seen_at |= dict.fromkeys(answered, now)
        if not engines.silent:  # whoever is missing was taken away
            self._seen_at = dict.fromkeys(answered, now)
        self._seen_at = {name: at for name, at in self._seen_at.items() if now - at < FORGET_S}
        families = [(self._own.replica, _gauge("replicas_silent", _SILENT, engines.silent))]
        families += [(name, _gauge("replica_up", _UP, name in answered)) for name in self._seen_at]
        return [Told(name, self._own.model, (family,)) for name, family in families]


_UP = "1: the engine replica answered this scrape; 0: it was asked and did not."
_SILENT = "Engine replicas that were asked and did not answer in time."


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(f"blockcast_{name}", help_, value=float(value))
