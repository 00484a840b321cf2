"""What a request's listener hears from the engine: any number of deltas and canvases, then one end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.engine.timeline import Timeline
from model.decoding import GenerationResult, Reveal, TokenLogprob


@dataclass(frozen=True)
class Delta:
    """Tokens that are final, and text that is: whole characters, never a part of a stop string.

    logprobs: one for each of token_ids, None where the request did not ask.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Canvas:
    """For requests with `trace`: what one forward decided, in the block that starts at `block_start`.

    Positions count from the prompt's first token; every one from `prompt_tokens` on is in one canvas only. A commit or
    the prompt's last chunk decides one at most. block_size and sub_block_size are 1 where tokens come one by one; in
    lossless mode block_size is how many the forward decided.
    """

    id: str
    block_start: int
    reveals: tuple[Reveal, ...]
    block_size: int
    sub_block_size: int
    prompt_tokens: int


@dataclass(frozen=True)
class Finished:
    """The last event of a request that ran to its end. timeline: when what happened in the engine."""

    result: GenerationResult
    timeline: Timeline | None = None

    @property
    def id(self) -> str:
        return self.result.id


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not go on; `message` is one sentence.

    elsewhere: the engine is at fault, not the request: another engine may still answer it.
    """

    id: str
    message: str
    elsewhere: bool = False
    timeline: Timeline | None = None


Event = Delta | Canvas | Finished | Failed
Listener = Callable[[Event], None]
