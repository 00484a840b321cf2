"""What a gateway observes with, from the arguments of the application."""

from __future__ import annotations

from actors.gateway.admission import Admission
from actors.gateway.backend import Backend
from actors.gateway.metrics import Ask, GatewayMetrics, Scraper
from actors.gateway.record import Observer
from actors.gateway.request_log import RequestLog
from actors.serve_args import GATEWAY, ServeArgs
from actors.serving.place import replica_name
from actors.serving.tracing import make_tracer


def make_observer(args: ServeArgs, backend: Backend, admission: Admission, ask_gateways: Ask | None = None) -> Observer:
    """ask_gateways: the families of all gateways, where there may be several."""
    replica = replica_name()
    metrics = GatewayMetrics(
        replica,
        args.served_name or args.model,
        inside=lambda: admission.inside,
        limit=admission.limit,
        retries=lambda: backend.retries,
    )
    return Observer(
        metrics=metrics,
        scraper=Scraper(metrics, backend.metrics, ask_gateways),
        log=RequestLog(as_json=args.log_format == "json"),
        tracer=make_tracer(args.tracing, part=GATEWAY, replica=replica),
    )
