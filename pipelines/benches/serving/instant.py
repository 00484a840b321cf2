"""An engine replica that answers at once, without its engine: what is left is HTTP, gateway, Serve and Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from actors.engine.events import Delta, Finished
from actors.serving.replica import EngineReplica, Events
from model.decoding import GenerationRequest, GenerationResult

TEXT = "ok"


class InstantReplica(EngineReplica):
    """Every request gets the same two letters as one token."""

    async def generate(self, requests: tuple[GenerationRequest, ...], *_: Any, **__: Any) -> AsyncIterator[Events]:
        for request in requests:
            yield answer_to(request)


def answer_to(request: GenerationRequest) -> Events:
    """The events of one answer."""
    result = GenerationResult(
        id=request.id,
        token_ids=(request.prompt_ids[0],),
        text=TEXT,
        finish_reason="length",
        prompt_tokens=len(request.prompt_ids),
        forwards={"prefill": 1, "denoise": 0, "commit": 0},
        steps_per_block=[],
    )
    return [Delta(request.id, result.token_ids, TEXT), Finished(result)]
