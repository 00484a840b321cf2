"""The prefix-aware router: Serve asks it, for every request of a handle, to which replicas it may go, best first.

The choice is `actors.serving.ranking`'s; Serve's own mechanism does the rest: it asks for queue lengths, sends, and
comes back when a replica is full or has died. A replica that is known to be dead is never offered again, even while the
controller still lists it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import (
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from actors.serve_args import RoutingArgs
from actors.serving.ranking import Candidate, Ledger, PrefixReport, rank
from model.decoding.requests import GenerationRequest

ROUTER = "actors.serving.routing:PrefixRouter"
UNHEARD_REPORT_S = 3600.0  # Serve collects reports and sends them round whether a router wants them or not
REMEMBERED = 5.0  # reports: how long a prompt that was sent counts as cached


def router_config(args: RoutingArgs, *, replicas: int) -> RequestRouterConfig:
    """Serve's settings: this router where there is a choice among `replicas`, else Serve's own."""
    settings: dict[str, Any] = {"request_routing_stats_period_s": UNHEARD_REPORT_S}
    if args.prefix and replicas > 1:
        settings["request_routing_stats_period_s"] = args.report_s
        settings["request_router_class"] = ROUTER
        settings["request_router_kwargs"] = {
            "most_extra_tokens": args.most_extra_tokens,
            "remember_s": REMEMBERED * args.report_s,
        }
    return RequestRouterConfig(**settings)


class PrefixRouter(MultiplexMixin, RequestRouter):
    """Prefers the replica that holds the longest cached prefix of a request's prompt, else the shortest backlog."""

    def initialize_state(self, most_extra_tokens: float, remember_s: float) -> None:  # type: ignore[override]
        """most_extra_tokens: a holder with so much more backlog than the shortest is passed over."""
        self._most_extra = most_extra_tokens
        self._ledger = Ledger(remember_s)
        self._dead: set[ReplicaID] = set()
        self._reports: dict[tuple[ReplicaID, str], PrefixReport] = {}

    # ------------------------------------------------------------------------------------------- choosing
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas for one attempt to route a request."""
        allowed = {r.replica_id: r for r in candidate_replicas if r.replica_id not in self._dead}
        if pending_request is None:
            return [list(allowed.values())]
        model = pending_request.metadata.multiplexed_model_id
        if model:
            loaded = self.apply_multiplex_routing(pending_request)
            allowed = {name: replica for name, replica in allowed.items() if name in loaded}
        pending_request.routing_context.should_backoff = True
        requests = requests_of(pending_request)
        shuffled = random.sample(list(allowed.items()), len(allowed))  # or the first would get all that is equal
        candidates = [self._candidate(name, replica, model, requests) for name, replica in shuffled]
        return [[allowed[name] for name in group] for group in rank(candidates, self._most_extra)]  # type: ignore[index]

    def _candidate(
        self, name: ReplicaID, replica: RunningReplica, model: str, requests: Sequence[GenerationRequest]
    ) -> Candidate:
        report = self._report(name, replica, model)
        if report is None:
            return Candidate(name, 0, self._ledger.unreported(name, 0.0))
        cached = self._cached(name, report, requests[0]) if requests else 0
        return Candidate(name, cached, report.backlog + self._ledger.unreported(name, report.at))

    def _cached(self, name: ReplicaID, report: PrefixReport, request: GenerationRequest) -> int:
        chains = report.chains(request.prompt_ids, request.decode.mode)
        return max(self._ledger.pages(name, chain, report.keys) for chain in chains) * report.page_size

    def _report(self, name: ReplicaID, replica: RunningReplica, model: str) -> PrefixReport | None:
        """The latest of that replica about that model; unpacked once."""
        packed = replica.routing_stats.get(model)
        if packed is None:
            return None
        known = self._reports.get((name, model))
        if known is None or known.at != packed["at"]:
            known = self._reports[name, model] = PrefixReport.unpack(packed)
        return known

    # ------------------------------------------------------------------------------------------- what Serve tells
    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken the request."""
        requests = requests_of(pending_request)
        replica = self._replicas.get(replica_id)
        if not requests or replica is None:
            return
        request = requests[0]
        report = self._report(replica_id, replica, pending_request.metadata.multiplexed_model_id)
        if report is None:
            return
        chains = report.chains(request.prompt_ids, request.decode.mode)
        uncached = len(request.prompt_ids) - self._cached(replica_id, report, request)
        load = report.cost(uncached, request.max_tokens, len(requests))
        self._ledger.record(replica_id, pending_request.metadata.internal_request_id, chains, load)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ended, failed or cancelled."""
        self._ledger.ended(replica_id, internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Never again: the controller's list may name it until its health check fails."""
        self._dead.add(replica_id)
        super().on_replica_actor_died(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The controller's list, without those that are known to be dead."""
        listed = {r.replica_id for r in replicas}
        self._dead &= listed
        super().update_replicas([r for r in replicas if r.replica_id not in self._dead])
        self._ledger.forget_all_but(listed)
        self._reports = {key: report for key, report in self._reports.items() if key[0] in listed}

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give the replica to the request it was chosen for: the base class looks for it by an id that all calls of one
        HTTP request share, and would never find the second of two that wait at once.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return


def requests_of(pending: PendingRequest) -> tuple[GenerationRequest, ...]:
    """The requests to generate that a call carries, which have one prompt; none in a call of another method."""
    tuples = (arg for arg in (*pending.args, *pending.kwargs.values()) if isinstance(arg, tuple) and arg)
    return next((requests for requests in tuples if isinstance(requests[0], GenerationRequest)), ())
