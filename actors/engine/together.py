"""Many requests through one engine, waited for together: batches, benches, and the proof that a model generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from actors.engine.events import Event, Failed, Finished
from actors.engine.loop import Engine
from model.decoding import GenerationRequest, GenerationResult
from model.errors import JobError


def generate_all(
    engine: Engine,
    requests: Iterable[GenerationRequest],
    on_result: Callable[[GenerationResult], None] | None = None,
) -> list[GenerationResult]:
    """Run all requests and return their results in order; `on_result` hears each as it finishes.

    Drives the engine from this thread, unless its own thread runs. Raises UserError for a request that cannot run and
    JobError, after the others have finished, when one failed.
    """
    results: dict[str, GenerationResult] = {}
    failures: list[Failed] = []
    ended = threading.Semaphore(0)

    def listen(event: Event) -> None:
        if isinstance(event, Finished):
            results[event.id] = event.result
            if on_result is not None:
                on_result(event.result)
        elif isinstance(event, Failed):
            failures.append(event)
        if isinstance(event, Finished | Failed):
            ended.release()

    order = []
    for request in requests:
        engine.submit(request, listen)
        order.append(request.id)
    if engine.alive:
        for _ in order:
            ended.acquire()
    else:
        engine.run_until_idle()
    if failures:
        raise JobError(f"Request {failures[0].id!r} failed: {failures[0].message}")
    return [results[request_id] for request_id in order]
