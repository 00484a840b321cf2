"""The Serve application: a gateway (HTTP, cheap, CPU) in front of engine replicas (one model and one engine each).

`build` makes it from typed arguments: deploy/serve.yaml names it as import_path, `python -m actors.serve_local` calls
it. A replica is ready only when its engine has really generated a token. One request is one streaming call of
`EngineReplica.generate`; when the client leaves, cancelling that call aborts the row, and because cancellation is known
to get lost on chains of handles, the gateway also asks every replica to abort it.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.access import Access, load_key_hashes
from actors.card import model_card
from actors.engine import Engine, EngineConfig, generate_all
from actors.engine_stats import EngineStats
from actors.events import Event, Failed, Finished
from actors.http_app import Admission, Gateway, Served, create_app
from actors.protocol import check_default
from actors.serve_args import GATEWAY, REPLICA, ServeArgs
from model.backbone import DTYPES, Backbone, load_backbone
from model.decoding import GenerationRequest, SamplingParams
from model.errors import JobError, UserError

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0
GONE = "The engine replica that worked on this request went away: send it again."


@dataclass(frozen=True)
class Refused:
    """The engine will never run this request (a user's error); sent instead of events."""

    message: str


Events = list[Event | Refused]


def check_engine(*, alive: bool, progress_at: float, now: float, stall_s: float) -> None:
    """Raises JobError for an engine whose thread ended, or that finished no round (nor looked around) for `stall_s`."""
    if not alive:
        raise JobError("The engine's thread has ended: see the replica's log.")
    if now - progress_at > stall_s:
        raise JobError(f"The engine finished no round for {now - progress_at:.0f} s.")


class EngineReplica:
    """One model, one engine thread. Errors in the arguments or the model end the constructor with one sentence."""

    def __init__(self, args: ServeArgs) -> None:
        torch.set_num_threads(max(1, int(args.cpus_per_replica)))
        backbone = load_backbone(args.model, dtype=DTYPES[args.dtype_name], device=args.device)
        decode = args.decode.decode_config(adapted=backbone.block_diffusion is not None)
        card = model_card(backbone, name=args.served_name or args.model, max_length=args.engine.max_length)
        self._served = Served(card, check_default(decode, backbone.block_diffusion), created=int(time.time()))
        self._engine = Engine(backbone, EngineConfig(**args.engine.model_dump()))
        prove(self._engine, backbone, self._served)
        self._engine.start()
        self._stall_s = args.stall_s

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Events]:
        """The request's events as they come, several together when they came together; leaving early aborts the row."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event] = asyncio.Queue()

        def listen(event: Event) -> None:  # on the engine's thread
            loop.call_soon_threadsafe(queue.put_nowait, event)

        try:
            self._engine.submit(request, listen)
        except UserError as error:
            yield [Refused(str(error))]
            return
        except JobError as error:
            yield [Failed(request.id, str(error))]
            return
        ended = False
        try:
            while not ended:
                events: Events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                ended = isinstance(events[-1], Finished | Failed)
                yield events
        finally:
            if not ended:
                self._engine.abort(request.id)

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def served(self) -> Served:
        return self._served

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def ready(self) -> bool:
        """A replica exists only after a token was generated; what is left to ask is whether it goes on."""
        self.check_health()
        return True

    def check_health(self) -> None:
        check_engine(
            alive=self._engine.alive, progress_at=self._engine.progress_at, now=time.monotonic(), stall_s=self._stall_s
        )

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()


def prove(engine: Engine, backbone: Backbone, served: Served) -> None:
    """Generate one token for real, in the mode that requests will get. Raises JobError when none comes."""
    start = next(i for i in range(served.card.vocab_size) if i not in served.card.stop_token_ids)
    request = GenerationRequest(
        id="ready",
        prompt_ids=(start,),
        max_tokens=1,
        sampling=SamplingParams(),
        decode=served.decode,
        stop_token_ids=frozenset(),
    )
    results = generate_all(engine, [request])
    if len(results) != 1 or len(results[0].token_ids) != 1:
        raise JobError(f"{backbone.name} was loaded but generated no token: see the replica's log.")


class ReplicaBackend:
    """The gateway's `Backend` over Serve handles. What Ray reports becomes UserError or JobError."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._served: Served | None = None

    async def served(self) -> Served:
        if self._served is None:
            self._served = await self._ask("served")
        return self._served

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        responses: Any = self._handle.options(stream=True, method_name="generate").remote(request)
        try:
            async for events in responses:
                for event in events:
                    if isinstance(event, Refused):
                        raise UserError(event.message)
                    yield event
        except (RayError, RayServeException) as error:
            raise JobError(GONE) from error
        finally:
            responses.cancel()

    async def abort(self, request_id: str) -> None:
        await self._handle.broadcast("abort", request_id).results_async()

    async def ready(self) -> bool:
        return bool(await self._ask("ready"))

    async def _ask(self, method: str) -> Any:
        try:
            return await self._handle.options(method_name=method).remote()
        except (RayError, RayServeException) as error:
            raise JobError("No engine replica answers: try again in a moment.") from error


class GatewayDeployment:
    """The HTTP side as a deployment; the FastAPI application is made where the replica runs."""

    def __init__(self, engine: DeploymentHandle[Any], args: ServeArgs, key_hashes: tuple[str, ...]) -> None:
        self._gateway = Gateway(
            backend=ReplicaBackend(engine),
            access=Access(key_hashes),
            admission=Admission(args.requests_at_once),
            max_body_bytes=args.max_body_bytes,
        )

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._gateway)


def build(args: ServeArgs) -> Application:
    """The application from the `args` of serve.yaml. Keys are read here, once; only their hashes travel on."""
    # More requests than the gateway admits must reach it, or Serve would answer in its own words instead of a 429.
    common: dict[str, Any] = {
        "max_ongoing_requests": args.requests_at_once + 64,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": args.drain_s,
        "graceful_shutdown_wait_loop_s": min(2.0, args.drain_s),
    }
    engine: Any = serve.deployment(
        EngineReplica,
        name=REPLICA,
        ray_actor_options={"num_cpus": args.cpus_per_replica, "num_gpus": args.gpus_per_replica},
        **_replicas(args),
        **common,
    )
    gateway: Any = serve.deployment(
        serve.ingress()(GatewayDeployment), name=GATEWAY, ray_actor_options={"num_cpus": 0}, **common
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
    bounds = {"min_replicas": args.min_replicas, "max_replicas": args.max_replicas}
    return {"autoscaling_config": {**bounds, "target_ongoing_requests": args.engine.max_rows}}
