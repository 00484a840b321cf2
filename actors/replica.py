"""An engine replica: one model, one engine thread, behind plain async methods that Serve calls.

Ready only when its engine has really generated a token. A request is one streaming call of `generate`, which ends by
itself when the engine stands still or when nobody wants the answer any more; leaving it early aborts the row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any

import torch
from ray.actor import ActorHandle

from actors.backlog import BACKLOG
from actors.card import model_card
from actors.engine import Engine, EngineConfig, generate_all
from actors.engine_observer import EngineObserver
from actors.engine_stats import EngineStats
from actors.events import Event, Failed, Finished
from actors.gateway.backend import Served
from actors.gateway.exposition import Told
from actors.leases import Leases
from actors.liveness import lives
from actors.protocol import check_default
from actors.routing_stats import prefix_report
from actors.serve_args import ServeArgs
from model.backbone import DTYPES, Backbone, load_backbone
from model.decoding import GenerationRequest, SamplingParams
from model.errors import JobError, UserError

TICK_S = 0.5  # between two looks at the engine and the lease of a request without news
STALL_ROUNDS = 3  # a round may take so many times the longest one so far before the engine counts as stuck


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
        card = model_card(
            backbone,
            name=args.served_name or args.model,
            max_length=args.engine.max_length,
            max_answer_tokens=args.max_answer_tokens,
        )
        self._served = Served(card, check_default(decode, backbone.block_diffusion), created=int(time.time()))
        self._engine = Engine(backbone, EngineConfig(**args.engine.model_dump()))
        prove(self._engine, backbone, self._served)
        self._observer = EngineObserver(self._engine, model=card.name, tracing=args.tracing)
        self._engine.start()
        self._stall_s = args.stall_s
        self._leases = Leases()

    async def generate(
        self,
        request: GenerationRequest,
        gateway: str,
        traceparent: str | None = None,
        asker: ActorHandle | None = None,
    ) -> AsyncIterator[Events]:
        """The request's events as they come, several together when they came together; leaving early aborts the row.

        gateway: who asks, and renews its lease on the request. traceparent: of its span, where it is traced. asker: the
        actor it lives in, asked when it falls silent: renewals do not reach a replica that is being drained.
        """
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
            yield [Failed(request.id, str(error), elsewhere=True)]
            return
        self._leases.open(request.id, gateway, time.monotonic())
        ended = False
        try:
            while not ended:
                events = await self._next(queue, request.id, asker)
                ended = isinstance(events[-1], Finished | Failed)
                self._observer.hear(events[-1], traceparent)
                yield events
        finally:
            self._leases.close(request.id)
            if not (ended and isinstance(events[-1], Finished)):
                self._engine.abort(request.id)

    async def _next(self, queue: asyncio.Queue[Event], request_id: str, asker: ActorHandle | None) -> Events:
        """The next events, or the failure of an engine that stands still, or of a request that nobody wants."""
        getting = asyncio.ensure_future(queue.get())
        try:
            while not getting.done():
                await asyncio.wait({getting}, timeout=TICK_S)
                now = time.monotonic()
                if not getting.done():
                    try:
                        self._check(now)
                    except JobError as error:
                        return [Failed(request_id, str(error), elsewhere=True)]
                if self._leases.expired(request_id, now) and not await self._asker_lives(request_id, asker):
                    return [Failed(request_id, "The gateway that asked is gone.", elsewhere=True)]
        finally:
            getting.cancel()
        events: Events = [getting.result()]
        while not queue.empty():
            events.append(queue.get_nowait())
        return events

    async def _asker_lives(self, request_id: str, asker: ActorHandle | None) -> bool:
        return asker is not None and await lives(asker) and self._leases.heard(request_id, time.monotonic())

    async def abort(self, request_id: str) -> None:
        """Free the rows of a request whose client left, whichever run of it is here."""
        for run_id in self._leases.family(request_id) or [request_id]:
            self._engine.abort(run_id)

    async def renew(self, gateway: str, wanted: Collection[str]) -> None:
        """A gateway lives and still wants these runs; its others end here."""
        for run_id in self._leases.renew(gateway, frozenset(wanted), time.monotonic()):
            self._engine.abort(run_id)
            self._leases.close(run_id)  # its generate, if it still waits, ends at its next look

    async def served(self) -> Served:
        return self._served

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def metrics(self) -> Told:
        return self._observer.told()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler hears of this replica; see `actors.autoscaling`."""
        return {BACKLOG: self._engine.backlog().tokens}

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers hear of it, by model ("" is the only one); see `actors.ranking`."""
        return {"": prefix_report(self._engine).pack()}

    async def ready(self) -> bool:
        """A replica exists only after a token was generated; what is left to ask is whether it goes on."""
        self.check_health()
        return True

    def check_health(self) -> None:
        self._check(time.monotonic())

    def _check(self, now: float) -> None:
        stall_s = max(self._stall_s, STALL_ROUNDS * self._engine.longest_round_s)
        check_engine(alive=self._engine.alive, progress_at=self._engine.progress_at, now=now, stall_s=stall_s)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()
        if hasattr(self, "_observer"):
            self._observer.close()


def prove(engine: Engine, backbone: Backbone, served: Served) -> None:
    """Generate one token for real, in the mode that requests will get. Raises JobError when none comes.

    The prompt fills a round's budget of prompt tokens, so that the longest kind of round is known from the start.
    """
    start = next(i for i in range(served.card.vocab_size) if i not in served.card.stop_token_ids)
    length = max(1, min(engine.config.prefill_tokens, engine.max_length - 1))
    request = GenerationRequest(
        id="ready",
        prompt_ids=(start,) * length,
        max_tokens=1,
        sampling=SamplingParams(),
        decode=served.decode,
        stop_token_ids=frozenset(),
    )
    results = generate_all(engine, [request])
    if len(results) != 1 or len(results[0].token_ids) != 1:
        raise JobError(f"{backbone.name} was loaded but generated no token: see the replica's log.")
