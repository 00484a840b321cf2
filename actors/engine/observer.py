"""An engine replica as those who run it see it: its metrics, its error lines, and its spans of traced requests."""

from __future__ import annotations

import logging

from actors.engine.events import Failed, Finished
from actors.engine.loop import Engine
from actors.engine.metrics import EngineMetrics
from actors.gateway.exposition import Told
from actors.serve_args import REPLICA, TracingArgs
from actors.serving.logs import join_serve_log
from actors.serving.place import OUTSIDE, replica_name
from actors.serving.tracing import make_tracer

log = logging.getLogger("ray.serve.blockcast")


class EngineObserver:
    """model: the served name. `hear` every event that leaves the replica."""

    def __init__(self, engine: Engine, *, model: str, tracing: TracingArgs) -> None:
        replica = replica_name()
        self._metrics = EngineMetrics(engine, replica=replica, model=model)
        self._tracer = make_tracer(tracing, part=REPLICA, replica=replica)
        if replica != OUTSIDE:
            join_serve_log()

    def hear(self, event: object, traceparent: str | None) -> None:
        """Count, trace and log what has ended. traceparent: of the gateway's span, where the request is traced."""
        if not isinstance(event, Finished | Failed):
            return
        self._metrics.hear(event)
        if isinstance(event, Failed):
            log.error("the engine could not finish a request: %s", event.message, extra={"id": event.id})
        if self._tracer is not None and traceparent is not None and event.timeline is not None:
            self._tracer.engine_spans(traceparent, event if isinstance(event, Finished) else None, event.timeline)

    def told(self) -> Told:
        """The replica's families now."""
        return self._metrics.told()

    def close(self) -> None:
        """Export what is left."""
        if self._tracer is not None:
            self._tracer.shut_down()
