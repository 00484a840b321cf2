"""The Serve application: a gateway (HTTP, cheap, CPU) in front of engine replicas (one model and one engine each).

`build` makes it from typed arguments: deploy/serve.yaml names it as import_path, `python -m actors.serve_local` calls
it.
"""

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from actors.gateway.access import Access, load_key_hashes
from actors.gateway.admission import Admission
from actors.gateway.app import create_app
from actors.gateway.asking import ask_all
from actors.gateway.body import BodyReader
from actors.gateway.exposition import Scrape, Told
from actors.gateway.gateway import Gateway
from actors.gateway.observing import make_observer
from actors.gateway.replicas import METRICS_TIMEOUT_S, ReplicaBackend
from actors.serve_args import GATEWAY, REPLICA, ServeArgs
from actors.serving.autoscaling import autoscaling_config
from actors.serving.logs import logging_config
from actors.serving.replica import EngineReplica
from actors.serving.routing import router_config
from actors.serving.tracing import check_tracing
from model.errors import UserError

HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 3.0  # Serve replaces a replica after the third failure in a row
BODIES_AT_ONCE = 1000  # requests whose bodies still arrive, beyond those that are admitted


class GatewayDeployment:
    """The HTTP side as a deployment; the FastAPI application is made where the replica runs."""

    def __init__(self, engine: DeploymentHandle[Any], args: ServeArgs, key_hashes: tuple[str, ...]) -> None:
        backend = ReplicaBackend(engine, sleeps=args.min_replicas == 0)
        admission = Admission(args.requests_per_gateway, args.key_requests_per_gateway)
        self._gateway = Gateway(
            backend=backend,
            access=Access(key_hashes),
            admission=admission,
            bodies=BodyReader(args.max_body_bytes, args.body_timeout_s),
            observer=make_observer(args, backend, admission, ask_gateways),
            deadline_s=args.deadline_s,
            further=tuple(further.name for further in args.models),
        )
        self._cors_origins = args.cors_origins

    async def metrics(self) -> Told:
        """For another gateway, which was asked for the metrics of all."""
        return self._gateway.observer.metrics.told()

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._gateway, cors_origins=self._cors_origins)


async def ask_gateways() -> Scrape:
    """The families of every gateway of this application, as one of them sees it."""
    handle = serve.get_deployment_handle(GATEWAY, serve.get_replica_context().app_name)
    return await ask_all(handle, "metrics", METRICS_TIMEOUT_S)


def build(args: ServeArgs) -> Application:
    """The application from the `args` of serve.yaml. Keys are read here, once; only their hashes travel on."""
    return application(args)


def application(args: ServeArgs, replica: type[EngineReplica] = EngineReplica) -> Application:
    """`build`, with the class of the engine replicas as an argument: what breaks or measures them brings its own."""
    check_tracing(args.tracing)
    common: dict[str, Any] = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": args.drain_s,
        "graceful_shutdown_wait_loop_s": min(2.0, args.drain_s),
        "logging_config": logging_config(args.log_format),
        # More requests than the gateway admits must reach it, or Serve would answer in its own words instead of a 429.
        "max_ongoing_requests": args.requests_at_once + BODIES_AT_ONCE,
    }
    engine: Any = serve.deployment(
        replica,
        name=REPLICA,
        ray_actor_options={"num_cpus": args.cpus_per_replica, "num_gpus": args.gpus_per_replica},
        request_router_config=router_config(args.routing, replicas=args.max_replicas),
        **_replicas(args),
        **common,
    )
    gateway: Any = serve.deployment(
        serve.ingress()(GatewayDeployment),
        name=GATEWAY,
        num_replicas=args.gateway_replicas,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,  # it costs no CPU or GPU: a new one stands before the old one goes
        **common,
    )
    return gateway.bind(engine.bind(args), args, _key_hashes(args))


def _key_hashes(args: ServeArgs) -> tuple[str, ...]:
    """The configured keys. Raises UserError where none are and HAProxy would hide from the gateway who asks."""
    hashes = load_key_hashes(args.api_keys_file, os.environ)
    if not hashes and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        raise UserError(
            "Behind HAProxy every client looks local: set api_keys_file, or unset RAY_SERVE_ENABLE_HA_PROXY."
        )
    return hashes


def _replicas(args: ServeArgs) -> dict[str, Any]:
    if args.min_replicas == args.max_replicas:
        return {"num_replicas": args.min_replicas}
    return {"autoscaling_config": autoscaling_config(args)}
