"""One question to every replica of a deployment, each with the same bounded time to answer.

Serve's broadcast has public ways to wait for all answers or for none of them: one replica that hangs would hide all
others. So the replies are awaited one by one here, which takes a method that Ray calls its own (2.60; the version is
pinned, and tests/api asks a stopped replica).
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.gateway.exposition import Scrape


async def ask_all(handle: DeploymentHandle[Any], method: str, timeout_s: float) -> Scrape:
    """What every replica that runs now tells, when asked for `method`; who takes longer or fails is silent."""
    try:
        async with asyncio.timeout(timeout_s):
            replies: Any = await handle.broadcast(method)._fetch_replica_results_async()
    except (TimeoutError, RayError, RayServeException):
        return Scrape()  # no replica runs
    asked = [asyncio.ensure_future(reply.get_async()) for reply in replies]
    done, late = await asyncio.wait(asked, timeout=timeout_s)
    for task in late:
        task.cancel()
    told = tuple(task.result() for task in asked if task in done and not _failed(task))
    return Scrape(told, silent=len(asked) - len(told))


def _failed(task: asyncio.Future[Any]) -> bool:
    """Whether the replica went away; anything but Ray's errors is a defect and comes out."""
    return task.exception() is not None and isinstance(task.exception(), RayError | RayServeException)
