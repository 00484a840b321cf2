"""One request's state machine over the positions of its row. No tensors: NumPy arrays and counters.

Every position is masked, decided or committed (its keys and values are in the cache for good); the state is an array,
never guessed from a token's value, so a prompt may hold the mask token. Positions of a row, K = 4, prompt of 6:

    [cccc dduu]            prompt's whole blocks committed, its tail decided at the head of the working block
          ^ block_start    d decided, u masked (unknown)
    PREFILL until the prompt's whole blocks are committed; its last logit decides position 0 of the next block
    DENOISE while the working block has a mask: reveal slots of the leftmost sub-block that has one
    COMMIT  a full block: its keys and values stay, its last logit decides the first slot of the next block
    DONE    a stop was decided with nothing masked before it, or max_tokens are decided

AR mode is the same machine with blocks of one token: every step commits one and decides the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from transformers import PreTrainedTokenizerBase

from model.config import BlockDiffusionConfig
from model.decoding.policies import steps_of_sub_block
from model.decoding.requests import GenerationRequest, GenerationResult, TokenLogprob
from model.decoding.text import TextTracker

MASKED, DECIDED, COMMITTED = 0, 1, 2


class Phase(StrEnum):
    """What a row needs next."""

    PREFILL = "prefill"
    DENOISE = "denoise"
    COMMIT = "commit"
    DONE = "done"


@dataclass(frozen=True)
class Reveal:
    """A position decided in a step, with the confidence in its token, and its log-probability where it was asked."""

    position: int
    token: int
    confidence: float
    logprob: TokenLogprob | None = None


class Row:
    """A running request. `slot` is its row in the cache, `max_length` the longest row in tokens (prompt and answer)."""

    def __init__(
        self,
        request: GenerationRequest,
        slot: int,
        max_length: int,
        block_diffusion: BlockDiffusionConfig | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.request = request
        self.slot = slot
        self.block_size, self.sub_block_size = _sizes(request, block_diffusion)
        self.prompt_length = len(request.prompt_ids)
        self.limit = self.prompt_length + request.max_tokens
        whole_blocks = -(-self.limit // self.block_size) * self.block_size
        self.end = min(whole_blocks, max_length)  # a last block that would not fit is cut short
        self.tokens = np.zeros(self.end, dtype=np.int64)
        self.state = np.full(self.end, MASKED, dtype=np.uint8)
        self.tokens[: self.prompt_length] = request.prompt_ids
        self.state[: self.prompt_length] = DECIDED
        self.committed = 0
        self.frontier = self.prompt_length  # end of the contiguous decided prefix
        self.finish_reason: str | None = None
        self.forwards = {"prefill": 0, "denoise": 0, "commit": 0}
        self.steps_per_block: list[int] = []
        self.block_steps = 0
        self._sub_block_steps = 0
        self._block_cached = False
        self._delivered = self.prompt_length
        self._stop_ids = request.stop_token_ids | _special_stops(request.stop_strings, tokenizer)
        self._text = TextTracker(tokenizer, request.stop_strings)
        self._logprobs: dict[int, TokenLogprob] = {}  # by position, where the request asks

    # ------------------------------------------------------------------------------------------- what is needed next
    @property
    def causal(self) -> bool:
        """True in AR mode: every token sees what stands before it and itself."""
        return self.block_size == 1

    @property
    def prefill_left(self) -> int:
        """Prompt tokens of whole blocks that are not in the cache yet."""
        return max(0, self.prompt_length // self.block_size * self.block_size - self.committed)

    @property
    def block_end(self) -> int:
        return min(self.committed + self.block_size, self.end)

    @property
    def phase(self) -> Phase:
        if self.finish_reason is not None:
            return Phase.DONE
        if self.prefill_left:
            return Phase.PREFILL
        return Phase.DENOISE if self._first_masked() < self.block_end else Phase.COMMIT

    @property
    def query(self) -> tuple[int, int]:
        """Positions [start, end) whose tokens the next decoding forward must run."""
        if self.phase is Phase.DENOISE and self._partial():
            return self.sub_block
        return self.committed, self.block_end

    @property
    def sub_block(self) -> tuple[int, int]:
        """Positions [start, end) of the active sub-block: the leftmost that holds a mask."""
        start = self._first_masked() // self.sub_block_size * self.sub_block_size
        return start, min(start + self.sub_block_size, self.block_end)

    def candidates(self) -> np.ndarray:
        """Masked positions of the active sub-block, ascending."""
        start, end = self.sub_block
        return start + np.flatnonzero(self.state[start:end] == MASKED)

    @property
    def steps_left(self) -> int:
        """Steps that the `static` policy's budget still grants the active sub-block, this one included."""
        steps = self.request.decode.steps or self.block_size
        index = (self.sub_block[0] - self.committed) // self.sub_block_size
        granted = steps_of_sub_block(steps, index, self.block_size // self.sub_block_size)
        return max(1, granted - self._sub_block_steps)

    @property
    def progress(self) -> float:
        """The decided share of the working block, 0 to 1."""
        state = self.state[self.committed : self.block_end]
        return float(np.count_nonzero(state != MASKED)) / len(state)

    def canvas(self, start: int, end: int, mask_token_id: int | None) -> np.ndarray:
        """Ids of positions [start, end) as the model sees them: the mask token where masked."""
        tokens = self.tokens[start:end]
        masked = self.state[start:end] == MASKED
        if not masked.any():
            return tokens
        assert mask_token_id is not None, "only diffusion rows have masked positions in a forward"
        return np.where(masked, mask_token_id, tokens)

    def _first_masked(self) -> int:
        """The working block's first masked position, its end where none is: the decided prefix ends there."""
        return min(self.frontier, self.block_end)

    def _partial(self) -> bool:
        """Sub-block cache: only the sub-block runs, once the block is cached and its first slot needs no logit."""
        cached = self._block_cached and self.request.decode.refresh == "sub_block"
        return cached and self.state[self.sub_block[0]] != MASKED

    # ------------------------------------------------------------------------------------------- what a forward brings
    def decides_head(self, phase: Phase, count: int) -> bool:
        """Whether the last logit of this prefill or commit decides the position behind it."""
        if phase is Phase.COMMIT:
            return True
        return phase is Phase.PREFILL and self.committed + count == self.prompt_length

    def prefilled(self, count: int, head: int | None) -> None:
        """`count` prompt tokens entered the cache; `head`: the token decided behind them, if any."""
        self.forwards["prefill"] += 1
        self._commit(self.committed + count, head)

    def block_committed(self, head: int) -> None:
        """The working block entered the cache; `head` is the first token of the next one."""
        self.forwards["commit"] += 1
        self._close_block()
        self._commit(self.block_end, head)

    def revealed(self, reveals: Iterable[Reveal]) -> None:
        """One denoising step: these positions are decided now."""
        before = self.sub_block
        self._block_cached = self._block_cached or not self._partial()
        for reveal in reveals:
            assert self.state[reveal.position] == MASKED, f"position {reveal.position} was decided already"
            self.tokens[reveal.position] = reveal.token
            self.state[reveal.position] = DECIDED
        self.forwards["denoise"] += 1
        self.block_steps += 1
        self._sub_block_steps += 1
        self._advance()
        if self.frontier >= before[1]:
            self._sub_block_steps = 0

    def keep_logprobs(self, reveals: Iterable[Reveal]) -> None:
        """Remember the log-probabilities of decided tokens; every way a position is decided passes here."""
        self._logprobs |= {r.position: r.logprob for r in reveals if r.logprob is not None}

    def _commit(self, end: int, head: int | None) -> None:
        self.state[self.committed : end] = COMMITTED
        self.committed = end
        if head is not None:
            self.tokens[end] = head
            self.state[end] = DECIDED
            self._advance()

    def _close_block(self) -> None:
        if self.block_steps:
            self.steps_per_block.append(self.block_steps)
        self.block_steps = self._sub_block_steps = 0
        self._block_cached = False

    def _advance(self) -> None:
        """Walk the contiguous decided prefix token by token: stops and the budget end the row exactly there."""
        while self.finish_reason is None and self.frontier < self.end and self.state[self.frontier] != MASKED:
            token = int(self.tokens[self.frontier])
            self.frontier += 1
            if token in self._stop_ids or self._text.push(token):
                self._finish("stop")
            elif self.frontier == self.limit:
                self._finish("length")

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._text.finish()
        self._close_block()

    # ------------------------------------------------------------------------------------------- what the caller gets
    def take_delta(self) -> tuple[tuple[int, ...], str]:
        """Final tokens and text that nobody has got yet, cut at sub-blocks; empty when there is nothing new."""
        boundary = self.frontier // self.sub_block_size * self.sub_block_size
        if self.finish_reason is None and boundary <= self._delivered:
            return (), ""
        tokens = tuple(self.tokens[self._delivered : self.frontier].tolist())
        self._delivered = self.frontier
        return tokens, self._text.take()

    def logprobs(self, count: int) -> tuple[TokenLogprob, ...] | None:
        """Of the last `count` final tokens; None where the request does not ask."""
        if self.request.logprobs is None:
            return None
        return tuple(self._logprobs[p] for p in range(self.frontier - count, self.frontier))

    def result(self) -> GenerationResult:
        """The answer of a finished row."""
        assert self.finish_reason is not None, "the row has not finished"
        return GenerationResult(
            id=self.request.id,
            token_ids=tuple(self.tokens[self.prompt_length : self.frontier].tolist()),
            text=self._text.text,
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_length,
            forwards=dict(self.forwards),
            steps_per_block=list(self.steps_per_block),
            logprobs=self.logprobs(self.frontier - self.prompt_length),
        )


def _sizes(request: GenerationRequest, block_diffusion: BlockDiffusionConfig | None) -> tuple[int, int]:
    """(block, sub-block) in tokens; AR mode decodes blocks of one."""
    if request.decode.mode == "ar":
        return 1, 1
    assert block_diffusion is not None, "check_request refuses diffusion without a block-diffusion model"
    return block_diffusion.block_size, request.decode.sub_block_size or block_diffusion.sub_block_size


def _special_stops(stop_strings: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """A stop string that is a special token never shows in the text: it stops by id."""
    if not stop_strings:
        return frozenset()
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(special[stop] for stop in stop_strings if stop in special)
