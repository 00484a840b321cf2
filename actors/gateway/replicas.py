"""The gateway's backend over Serve handles: what Ray reports becomes UserError or JobError.

A run whose engine goes away is begun again on another (`actors.gateway.replay`), so a killed replica costs time, not
answers. When a client leaves, cancelling the call aborts its row; because cancellation is known to get lost on chains
of handles, the replica that runs it is also told directly, which reaches one that is being drained; every replica that
is not is asked to abort it; and none works longer than its lease (`actors.serving.leases`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.engine.events import Event, Failed, Finished
from actors.gateway.asking import ask_all
from actors.gateway.backend import Served, Unavailable
from actors.gateway.exposition import Scrape
from actors.gateway.replay import Replay
from actors.serving.liveness import this_actor
from actors.serving.replica import Here, Refused, abort_here
from model.decoding import GenerationRequest
from model.errors import JobError, UserError

RETRY_PAUSES_S = (0.1, 0.5, 1, 2, 2, 2, 2, 4, 4, 4)  # long enough for a crashed engine's replica to be replaced
LOOK_PAUSES_S = (0.1, 0.5, 1)  # for a replica that knows a model
RENEW_S = 1.0
METRICS_TIMEOUT_S = 2.0
GONE = "No engine could finish this request: send it again in a moment."
log = logging.getLogger("ray.serve.blockcast")


class _EngineGone(Exception):
    """The run ended through no fault of the request."""


class ReplicaBackend:
    """The gateway's `Backend` over Serve handles.

    sleeps: all replicas may be gone while nobody asks (min_replicas 0).
    """

    def __init__(self, handle: DeploymentHandle[Any], *, sleeps: bool = False) -> None:
        self._handle = handle
        self._served: dict[str | None, Served] = {}
        self._name = uuid.uuid4().hex
        self._wanted: dict[str, str] = {}  # request id -> id of its present run, until it has ended
        self._renewing: asyncio.Task[None] | None = None
        self._sleeps = sleeps
        self._proven = False
        self.retries = 0

    async def served(self, model: str | None = None) -> Served:
        if model not in self._served:
            self._served[model] = await self._ask_for(model)
            self._proven = True  # no replica answers before it has generated a token
        return self._served[model]

    async def _ask_for(self, model: str | None) -> Served:
        """What a replica tells of a model. While a deployment that adds it rolls out, old replicas do not know it."""
        for pause_s in (0.0, *LOOK_PAUSES_S):
            await asyncio.sleep(pause_s)
            told: Served | None = await self._ask("served", model)
            if told is not None:
                return told
        raise Unavailable(f"No engine replica has the model {model!r} yet: try again in a moment.")

    async def generate(
        self, requests: Sequence[GenerationRequest], traceparent: str | None = None, model: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events as if one engine had run the requests from beginning to end, whichever engines did."""
        left = {request.id: (request, Replay(request.id)) for request in requests}
        served = self._served.get(model)
        revision = None if served is None else served.card.revision
        try:
            for attempt in range(len(RETRY_PAUSES_S) + 1):
                runs = _runs(left.values(), attempt)
                self._wanted |= {id_: run.id for id_, run in zip(left, runs, strict=True)}
                self._keep_leases()
                replays = {run.id: replay for run, (_, replay) in zip(runs, left.values(), strict=True)}
                try:
                    async with aclosing(self._run(runs, traceparent, model, revision)) as events:
                        async for event in events:
                            passed = replays[event.id].pass_on(event)
                            if passed is not None:
                                if isinstance(passed, Finished):
                                    del left[passed.id], self._wanted[passed.id]
                                yield passed
                    return
                except _EngineGone as gone:
                    self._served.pop(model, None)  # a new deployment may have other weights
                    log.warning(f"{runs[0].id} lost its engine ({gone}): run {attempt + 1} begins")
                    if attempt == len(RETRY_PAUSES_S):
                        raise Unavailable(GONE) from gone
                    self.retries += 1
                    await asyncio.sleep(RETRY_PAUSES_S[attempt])
        finally:
            for request_id in left:
                self._wanted.pop(request_id, None)

    async def _run(
        self, runs: tuple[GenerationRequest, ...], traceparent: str | None, model: str | None, revision: str | None
    ) -> AsyncGenerator[Event, None]:
        """One run of each request, all on one engine. Raises _EngineGone where another one may still answer."""
        handle: Any = self._handle.options(stream=True, method_name="generate", multiplexed_model_id=model or "")
        responses = handle.remote(runs, self._name, traceparent, this_actor(), model, revision)
        left, place = {run.id for run in runs}, None
        try:
            async for events in responses:
                for event in events:
                    if isinstance(event, Here):
                        place = event.actor
                        continue
                    if isinstance(event, Refused):
                        raise UserError(event.message)
                    if isinstance(event, Failed) and event.elsewhere:
                        raise _EngineGone(event.message)
                    if isinstance(event, Finished):
                        left.discard(event.id)
                    yield event
        except RayTaskError as error:  # the replica's own code raised: it would again
            raise JobError("The engine replica failed on this request: see its log.") from error
        except (RayError, RayServeException) as error:
            raise _EngineGone(type(error).__name__) from error
        finally:
            responses.cancel()
            if left and place is not None:
                place.__ray_call__.remote(abort_here, tuple(left))

    async def abort(self, request_id: str) -> None:
        with contextlib.suppress(RayError, RayServeException):  # a replica that is gone has nothing to free
            await self._handle.broadcast("abort", request_id).results_async()

    async def ready(self) -> bool:
        """Whether a replica has generated a token. Where they sleep, once is enough: to ask again would wake one."""
        if not (self._sleeps and self._proven):
            self._proven = bool(await self._ask("ready"))
        return self._proven

    async def metrics(self) -> Scrape:
        return await ask_all(self._handle, "metrics", METRICS_TIMEOUT_S)

    def _keep_leases(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """Tell every replica about once a second which runs are wanted, as long as any is."""
        while self._wanted:
            await asyncio.sleep(RENEW_S)
            # One replica that hangs must not keep the word from the others: they have it, its answer is not awaited.
            with contextlib.suppress(RayError, RayServeException, TimeoutError):
                word = self._handle.broadcast("renew", self._name, tuple(self._wanted.values()))
                await asyncio.wait_for(word.results_async(), RENEW_S)

    async def _ask(self, method: str, model: str | None = None) -> Any:
        handle = self._handle.options(method_name=method, multiplexed_model_id=model or "")
        try:
            return await (handle.remote() if model is None else handle.remote(model))
        except RayTaskError as error:  # the replica's own code raised: the model does not load, or no engine moves
            raise JobError("The engine replica failed: see its log.") from error
        except (RayError, RayServeException) as error:
            raise Unavailable("No engine replica answers: try again in a moment.") from error


def _runs(left: Iterable[tuple[GenerationRequest, Replay]], attempt: int) -> tuple[GenerationRequest, ...]:
    """A run of every request that has not ended; the first of them encodes the prompt for the others."""
    runs: list[GenerationRequest] = []
    for request, replay in left:
        replay.begin()
        run = _again(request, attempt, replay) if attempt else request
        runs.append(replace(run, follows=runs[0].id if runs else None))
    return tuple(runs)


def _again(request: GenerationRequest, attempt: int, replay: Replay) -> GenerationRequest:
    """The request for another engine. It goes on behind the blocks that the client has, where that gives the same."""
    same = request.decode.mode != "auto" and request.logprobs is None
    return replace(request, id=f"{request.id}~{attempt}", answered=replay.tokens if same else ())
