"""Whether the process behind an actor handle still answers."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError

ANSWER_S = 5.0


def this_actor() -> Any | None:
    """A handle of the actor that this code runs in; None outside of actors."""
    if not ray.is_initialized():  # asking for the context would start one
        return None
    context = ray.get_runtime_context()
    return context.current_actor if context.get_actor_id() else None


async def lives(actor: Any) -> bool:
    """Ask the actor itself; one that does not answer in time counts as gone."""

    async def ask() -> None:
        await actor.__ray_ready__.remote()

    try:
        await asyncio.wait_for(ask(), ANSWER_S)
    except (RayError, TimeoutError):
        return False
    return True
