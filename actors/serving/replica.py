"""An engine replica: one model, one engine thread, behind plain async methods that Serve calls.

Ready only when its engine has really generated a token. A request, with all the answers it asks for, is one streaming
call of `generate`, which ends by itself when the engine stands still or when nobody wants the answers any more; leaving
it early aborts the rows.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import torch
from ray.actor import ActorHandle

from actors.engine.backlog import BACKLOG
from actors.engine.events import Event, Failed, Finished, Listener
from actors.engine.stats import EngineStats
from actors.gateway.backend import Served
from actors.gateway.exposition import Told, joined
from actors.serve_args import ServeArgs
from actors.serving.leases import Leases
from actors.serving.liveness import lives, this_actor
from actors.serving.loaded_model import LoadedModel
from actors.serving.routing_stats import prefix_report
from actors.serving.shelf import Shelf
from model.decoding import GenerationRequest
from model.errors import JobError, UserError

TICK_S = 0.5  # between two looks at the engine and the lease of a request without news


@dataclass(frozen=True)
class Refused:
    """The engine will never run this request (a user's error); sent instead of events."""

    message: str


@dataclass(frozen=True)
class Here:
    """The first message of a call: the actor that runs it, for a word that reaches it even while it is drained."""

    actor: ActorHandle


Events = list[Event | Refused | Here]
_here: weakref.WeakSet[EngineReplica] = weakref.WeakSet()  # of this process


def abort_here(_: object, run_ids: Collection[str]) -> None:
    """Free the rows of these runs in the process that this is called in, on whichever thread: `actor.__ray_call__`."""
    for replica in list(_here):
        for run_id in run_ids:
            replica.abort_run(run_id)


class EngineReplica:
    """A model, its engine and its engine's thread, and further ones where the arguments name them.

    Errors in the arguments or the default model end the constructor with one sentence.
    """

    def __init__(self, args: ServeArgs) -> None:
        torch.set_num_threads(max(1, int(args.cpus_per_replica)))
        self._shelf = Shelf(args)
        self._engine = self._shelf.default.engine
        self._leases = Leases()
        self._actor = this_actor()
        _here.add(self)

    async def generate(
        self,
        requests: tuple[GenerationRequest, ...],
        gateway: str,
        traceparent: str | None = None,
        asker: ActorHandle | None = None,
        model: str | None = None,
        revision: str | None = None,
    ) -> AsyncIterator[Events]:
        """The requests' events as they come, several together when they came together; leaving early aborts the rows.

        requests: the choices of one call, one prompt; the last event is a Failed, or the Finished of the last of them.
        gateway: who asks, and renews its leases on the requests; asker: the actor it lives in, asked when it falls
        silent: renewals do not reach a replica that is being drained. model: None is the default one; revision: the
        weights that the gateway knows: while a deployment is replaced there may be others under the same name.
        traceparent: of its span, where it is traced.
        """
        if not self._shelf.knows(model):
            yield [Failed(requests[0].id, f"This replica has no model {model!r}.", elsewhere=True)]
            return
        if self._actor is not None:
            yield [Here(self._actor)]
        async with self._shelf.using(model) as loaded:
            if revision not in (None, loaded.served.card.revision):
                yield [Failed(requests[0].id, "This replica has another version of the model.", elsewhere=True)]
                return
            async with aclosing(self._run(loaded, requests, gateway, traceparent, asker)) as events:
                async for several in events:
                    yield several

    async def _run(
        self,
        loaded: LoadedModel,
        requests: tuple[GenerationRequest, ...],
        gateway: str,
        traceparent: str | None,
        asker: ActorHandle | None,
    ) -> AsyncGenerator[Events, None]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event] = asyncio.Queue()

        def listen(event: Event) -> None:  # on the engine's thread
            loop.call_soon_threadsafe(queue.put_nowait, event)

        left: list[str] = []
        try:
            refusal = self._submit(loaded, requests, listen, gateway, left)
            if refusal is not None:
                yield [refusal]
                return
            while left:
                events = await self._next(loaded, queue, left, asker)
                for event in events:
                    loaded.observer.hear(event, traceparent)
                    if isinstance(event, Finished):
                        self._leases.close(event.id)
                        left.remove(event.id)
                yield events
                if isinstance(events[-1], Failed):
                    return
        finally:
            for request_id in left:
                self._leases.close(request_id)
                loaded.engine.abort(request_id)

    def _submit(
        self,
        loaded: LoadedModel,
        requests: Sequence[GenerationRequest],
        listen: Listener,
        gateway: str,
        left: list[str],
    ) -> Refused | Failed | None:
        """Queue the requests; what was queued is in `left`. Returns what stops the call, if anything does."""
        for request in requests:
            try:
                loaded.engine.submit(request, listen)
            except UserError as error:
                return Refused(str(error))
            except JobError as error:
                return Failed(request.id, str(error), elsewhere=True)
            self._leases.open(request.id, gateway, time.monotonic())
            left.append(request.id)
        return None

    async def _next(
        self, loaded: LoadedModel, queue: asyncio.Queue[Event], left: Sequence[str], asker: ActorHandle | None
    ) -> Events:
        """The next events, up to a failure: of an answer, of an engine that stands still, of a call nobody wants.

        left: ids of the call's requests that have not ended.
        """
        getting = asyncio.ensure_future(queue.get())
        try:
            while not getting.done():
                await asyncio.wait({getting}, timeout=TICK_S)
                now = time.monotonic()
                if not getting.done():
                    try:
                        loaded.check(now)
                    except JobError as error:
                        return [Failed(left[0], str(error), elsewhere=True)]
                for request_id in left:
                    if self._leases.expired(request_id, now) and not await self._asker_lives(request_id, asker):
                        return [Failed(request_id, "The gateway that asked is gone.", elsewhere=True)]
        finally:
            getting.cancel()
        events: Events = [getting.result()]
        while not (queue.empty() or isinstance(events[-1], Failed)):
            events.append(queue.get_nowait())
        return events

    async def _asker_lives(self, request_id: str, asker: ActorHandle | None) -> bool:
        return asker is not None and await lives(asker) and self._leases.heard(request_id, time.monotonic())

    async def abort(self, request_id: str) -> None:
        """Free the rows of a request whose client left, whichever run of it is here."""
        for run_id in self._leases.family(request_id) or [request_id]:
            self.abort_run(run_id)

    async def renew(self, gateway: str, wanted: Collection[str]) -> None:
        """A gateway lives and still wants these runs; its others end here."""
        for run_id in self._leases.renew(gateway, frozenset(wanted), time.monotonic()):
            self.abort_run(run_id)
            self._leases.close(run_id)  # its generate, if it still waits, ends at its next look

    def abort_run(self, run_id: str) -> None:
        """Free the row of one run, from any thread."""
        for loaded in self._shelf.all().values():
            loaded.engine.abort(run_id)

    async def served(self, model: str | None = None) -> Served | None:
        """What a gateway must know of a model; nothing where it is none of this replica's. None: the default one."""
        if not self._shelf.knows(model):
            return None
        async with self._shelf.using(model) as loaded:
            return loaded.served

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler hears of this replica; see `actors.serving.autoscaling`."""
        return {BACKLOG: sum(loaded.engine.backlog().tokens for loaded in self._shelf.all().values())}

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers hear of it, by model ("" is the default one); see `actors.serving.ranking`."""
        return {name: prefix_report(loaded.engine).pack() for name, loaded in self._shelf.all().items()}

    async def metrics(self) -> Told:
        return joined([loaded.observer.told() for loaded in self._shelf.all().values()])

    async def ready(self) -> bool:
        """A replica exists only after a token was generated; what is left to ask is whether it goes on."""
        self.check_health()
        return True

    def check_health(self) -> None:
        """Raises JobError when an engine stands still, of whichever model."""
        for loaded in self._shelf.all().values():
            loaded.check(time.monotonic())

    def __del__(self) -> None:
        if hasattr(self, "_shelf"):
            self._shelf.close()
