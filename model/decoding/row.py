"""One request's state machine over the positions of its row. No tensors: NumPy arrays and counters.

Every position is masked, decided or committed (its keys and values are in the cache for good); the state is an array,
never guessed from a token's value, so a prompt may hold the mask token. Positions of a row, K = 4, prompt of 6:

    [cccc dduu]            prompt's whole blocks committed, its tail decided at the head of the working block
          ^ committed      d decided, u masked (unknown)
    PREFILL until `encode_until` is committed; the prompt's last logit decides position 0 of the next block
    DENOISE while the working block has a mask: reveal slots of the leftmost sub-block that has one
    COMMIT  a full block: its keys and values stay, its last logit decides the first slot of the next block
    DONE    a stop was decided with nothing masked before it, or max_tokens are decided

A row says with `next_query` what it runs in the next forward, and learns with `apply` what came of it. A query may be
fused, the clean tokens of a commit (or the prompt's last chunk) and the canvas of the block behind them in one piece:

    start [cccc|muuu] end        `keep` stands between the two

The slot at `keep`, decided from the logit before it in that same forward, is not known to the canvas: it stays masked
(`masked_head`), or holds a guess (`speculative`) and the denoising counts only if the guess was right.

AR mode is the same machine with blocks of one token: every step commits one and decides the next; lossless mode
(`model.decoding.lossless`) decides several where its drafts were right. Rows of a TwoTower model are in
`model.decoding.tower_rows`. A row that loses its
pages (`preempt`) keeps its tokens and encodes them again; one with a sub-block cache also runs its last refresh again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from model.config import BlockDiffusionConfig
from model.decoding.policies import steps_of_sub_block
from model.decoding.requests import GenerationRequest, GenerationResult, TokenLogprob
from model.decoding.text import TextTracker
from model.pages import Key

MASKED, DECIDED, COMMITTED = 0, 1, 2
NONE = np.zeros(0, dtype=np.int64)


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


@dataclass(frozen=True)
class Query:
    """What a row runs in one forward: positions [start, end), `ids` int64 as the model sees them.

    [start, keep) are clean tokens that this forward commits, [keep, end) the canvas of a working block, or a part of
    one. head: position `keep` is decided outright from the logit before it. candidates: masked positions int64 that
    the policy chooses from, of the block that begins at `block_start`; step and steps_left: denoising steps which that
    block has had, and which its policy's budget grants; progress: the decided share of that block. guess: the
    last logit also guesses position `end`. assumed: the guess that stands at `keep` in the canvas.
    drafted, drafts (lossless mode): clean tokens before `keep` that this forward verifies; tokens that the canvas
    drafts, for the positions behind `keep`.
    noisy_from: from this position on the query is a canvas for the model's second network (TwoTower's denoiser): all of
    it sees all of it, drafts begin at `keep`. time: the masked share of such a
    canvas. shift: from a slot to the token whose logit predicts it, 1, or 0 in a canvas without a token shift.
    reach: where a canvas ends that the row may run behind this query in the same round, 0 for none.
    """

    phase: Phase
    start: int
    keep: int
    end: int
    ids: np.ndarray
    head: bool = False
    candidates: np.ndarray = field(default_factory=lambda: NONE)
    block_start: int = 0
    step: int = 0
    steps_left: int = 1
    progress: float = 0.0
    guess: bool = False
    assumed: int | None = None
    drafted: int = 0
    drafts: int = 0
    noisy_from: int | None = None
    time: float = 0.0
    shift: int = 1
    reach: int = 0

    def __post_init__(self) -> None:
        assert self.start <= self.keep or self.phase is Phase.DENOISE
        assert self.start < self.end, "a query runs at least one token"

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def noisy(self) -> bool:
        """Whether all of it is the second network's."""
        return self.noisy_from == self.start


class Row:
    """A running request. `pages` are its pages of the cache; `max_length` the longest row in tokens."""

    heads = True  # whether the prompt's last logit decides a token

    def __init__(
        self,
        request: GenerationRequest,
        max_length: int,
        block_diffusion: BlockDiffusionConfig | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.request = request
        self.pages: list[int] = []
        self.keys: list[Key] = []  # of the pages that were published or found
        self.states: dict[int, Any] = {}  # of recurrent layers, behind what is committed
        self.block_size, self.sub_block_size = _sizes(request, block_diffusion)
        self.prompt_length = len(request.prompt_ids)
        self.limit = self.prompt_length + request.max_tokens
        whole_blocks = self._block_at(self.limit - 1) + self.block_size
        self.end = min(whole_blocks, max_length)  # a last block that would not fit is cut short
        self.tokens = np.zeros(self.end, dtype=np.int64)
        self.state = np.full(self.end, MASKED, dtype=np.uint8)
        self.tokens[: self.prompt_length] = request.prompt_ids
        self.state[: self.prompt_length] = DECIDED
        self.committed = 0
        self.encode_until = self._block_at(self.prompt_length)
        self.frontier = self.prompt_length  # end of the contiguous decided prefix
        self.finish_reason: str | None = None
        self.forwards = {"prefill": 0, "denoise": 0, "commit": 0}
        self.cached_tokens = 0  # prompt tokens found in the prefix cache
        self.steps_per_block: list[int] = []
        self.block_steps = 0
        self._sub_block_steps = 0
        self._mask_token_id = block_diffusion.mask_token_id if block_diffusion else 0
        self._refresh_every = request.decode.refresh_every
        self._refreshed: np.ndarray | None = None  # the working block as its last whole forward saw it
        self._since_refresh = 0
        self._replay = False  # the pages were lost: run `_refreshed` again before going on
        self._guess: int | None = None
        self._delivered = self.prompt_length
        self._stop_ids = request.stop_token_ids | _special_stops(request.stop_strings, tokenizer)
        self._text = TextTracker(tokenizer, request.stop_strings)
        self._logprobs: dict[int, TokenLogprob] = {}  # by position, where the request asks
        self._take_over(request.answered)

    def _take_over(self, answered: tuple[int, ...]) -> None:
        """Go on behind the blocks that another engine committed. The last token is decided again, so no row is done."""
        known = self._block_at(self.prompt_length + len(answered) - 1)
        if not answered or known <= self.prompt_length:
            return
        self.tokens[self.prompt_length : known] = answered[: known - self.prompt_length]
        self.state[self.prompt_length : known] = DECIDED
        self.encode_until = known
        self._advance()

    def _block_at(self, position: int) -> int:
        """Where the block begins that holds the position."""
        return position // self.block_size * self.block_size

    # ------------------------------------------------------------------------------------------- what is needed next
    @property
    def causal(self) -> bool:
        """True in AR mode: every token sees what stands before it and itself."""
        return self.block_size == 1

    @property
    def span(self) -> int:
        """How far clean tokens see: to the end of their span of so many positions. 1: no further than themselves."""
        return self.block_size

    @property
    def prefill_left(self) -> int:
        """Tokens of whole blocks that are not in the cache yet (and the working block, to be replayed)."""
        replay = self.block_end - self.committed if self._replay else 0
        return max(0, self.encode_until - self.committed) + replay

    @property
    def block_end(self) -> int:
        return min(self.committed + self.block_size, self.end)

    @property
    def reach(self) -> int:
        """Where the row's first decoding forward ends."""
        return min(self.encode_until + self.block_size, self.end)

    @property
    def phase(self) -> Phase:
        if self.finish_reason is not None:
            return Phase.DONE
        if self.prefill_left:
            return Phase.PREFILL
        return Phase.DENOISE if self.frontier < self.block_end else Phase.COMMIT

    def next_query(self, tokens: int = 0) -> Query:
        """The next forward's share of this row. tokens: of a prefill chunk, whole blocks; else ignored."""
        phase = self.phase
        assert phase is not Phase.DONE, "the row has finished"
        if phase is Phase.DENOISE:
            return self._denoise()
        if phase is Phase.COMMIT:
            return self._keep(phase, self.block_end)
        if self.committed < self.encode_until:
            return self._keep(phase, min(self.committed + tokens, self.encode_until))
        assert self._refreshed is not None, "only a block that was run can be replayed"
        return Query(phase, self.committed, self.committed, self.block_end, self._refreshed)

    def _denoise(self) -> Query:
        candidates = self._candidates(self.committed, head_known=True)
        start = self.committed
        end = self.block_end
        if self._partial(candidates):
            start = int(candidates[0]) // self.sub_block_size * self.sub_block_size
            end = min(start + self.sub_block_size, end)
        last = int(candidates[0]) // self.sub_block_size * self.sub_block_size + self.sub_block_size >= self.block_end
        return Query(
            Phase.DENOISE,
            start,
            self.committed,
            end,
            self._canvas(start, end),
            candidates=candidates,
            block_start=self.committed,
            step=self.block_steps,
            steps_left=self._steps_left(candidates, self._sub_block_steps),
            progress=self._progress(self.committed, self.block_end),
            guess=last and self.request.fused == "speculative" and self.block_end < self.end,
        )

    def _keep(self, phase: Phase, keep: int) -> Query:
        """A prefill chunk or a commit, with the canvas of the next block behind it where the request fuses them."""
        start = self.committed
        head = (phase is Phase.COMMIT or keep == self.encode_until) and self.state[keep] == MASKED
        candidates = self._candidates(keep, head_known=False) if self._fuses(phase, keep, head) else NONE
        if not len(candidates):
            return Query(phase, start, keep, keep, self.tokens[start:keep], head=head, block_start=keep)
        end = min(keep + self.block_size, self.end)
        assumed = self._guess if head and self.request.fused == "speculative" else None
        canvas = self._canvas(keep, end)
        if assumed is not None:
            canvas[0] = assumed
        fresh = phase is Phase.COMMIT
        return Query(
            phase,
            start,
            keep,
            end,
            np.concatenate([self.tokens[start:keep], canvas]),
            head=head,
            candidates=candidates,
            block_start=keep,
            step=0 if fresh else self.block_steps,
            steps_left=self._steps_left(candidates, 0 if fresh else self._sub_block_steps),
            progress=self._progress(keep, end) + (assumed is not None) / (end - keep),
            assumed=assumed,
        )

    def _fuses(self, phase: Phase, keep: int, head: bool) -> bool:
        """Whether the block at `keep` may be denoised in the forward that commits what stands before it."""
        fused = self.request.fused
        if self.causal or fused == "off" or self._replay or (phase is Phase.PREFILL and keep < self.encode_until):
            return False
        return fused == "masked_head" or not head or self._guess is not None

    def _candidates(self, start: int, *, head_known: bool) -> np.ndarray:
        """Masked positions of the leftmost sub-block that has one, in the block at `start`; not `start` itself unless
        `head_known`: then it is never masked."""
        begin = start if head_known else start + 1
        masked = begin + np.flatnonzero(self.state[begin : min(start + self.block_size, self.end)] == MASKED)
        if not len(masked):
            return masked
        sub_block_end = (masked[0] // self.sub_block_size + 1) * self.sub_block_size
        return masked[masked < sub_block_end]

    def _steps_left(self, candidates: np.ndarray, taken: int) -> int:
        """Steps that the `static` policy's budget still grants the candidates' sub-block, this one included."""
        steps = min(self.request.decode.steps or self.block_size, self.block_size)  # more are one slot a step as well
        index = int(candidates[0]) % self.block_size // self.sub_block_size
        granted = steps_of_sub_block(steps, index, self.block_size // self.sub_block_size)
        return max(1, granted - taken)

    def _progress(self, start: int, end: int) -> float:
        """The decided share of the block [start, end), 0 to 1."""
        return float(np.count_nonzero(self.state[start:end])) / (end - start)

    def _canvas(self, start: int, end: int) -> np.ndarray:
        """Ids of positions [start, end) as the model sees them: the mask token where masked."""
        return np.where(self.state[start:end] == MASKED, self._mask_token_id, self.tokens[start:end])

    def _partial(self, candidates: np.ndarray) -> bool:
        """Sub-block cache: only the sub-block runs, once the block is cached and its first slot needs no logit."""
        cached = self._refreshed is not None and self._since_refresh < self._refresh_every
        return cached and candidates[0] % self.sub_block_size != 0

    # ------------------------------------------------------------------------------------------- what a forward brings
    def apply(
        self, query: Query, head: Reveal | None, reveals: Sequence[Reveal], guess: int | None = None
    ) -> tuple[Reveal, ...]:
        """Take in what the forward of `query` decided; returns the reveals that count.

        head: the slot at `keep`; reveals: opened candidates; guess: a token for position `end`, where asked.
        """
        if query.keep > query.start:
            if query.phase is Phase.COMMIT:
                self._close_block()
            self.state[query.start : query.keep] = COMMITTED
            self.committed = query.keep
        elif query.phase is Phase.PREFILL:
            self._replay = False
        if head is not None:
            self._decide(head)
        wrong = query.assumed is not None and (head is None or head.token != query.assumed)
        if wrong or self.finish_reason is not None or not len(query.candidates):
            self.forwards[query.phase] += 1
            return ()
        self._denoised(query, reveals, guess)
        return tuple(reveals)

    def _denoised(self, query: Query, reveals: Sequence[Reveal], guess: int | None) -> None:
        """One denoising step, alone or fused."""
        if query.start <= query.block_start and query.end == min(query.block_start + self.block_size, self.end):
            self._refreshed = query.ids[query.block_start - query.start :]
            self._since_refresh = 0
        self._since_refresh += 1
        self.forwards[Phase.DENOISE] += 1
        self.block_steps += 1
        self._sub_block_steps += 1
        for reveal in reveals:
            self._decide(reveal)
        if self.finish_reason is None and len(reveals) == len(query.candidates):
            self._sub_block_steps = 0
            self._guess = guess

    def _decide(self, reveal: Reveal) -> None:
        assert self.state[reveal.position] == MASKED, f"position {reveal.position} was decided already"
        self.tokens[reveal.position] = reveal.token
        self.state[reveal.position] = DECIDED
        if reveal.logprob is not None:
            self._logprobs[reveal.position] = reveal.logprob
        self._advance()

    def _close_block(self) -> None:
        if self.block_steps:
            self.steps_per_block.append(self.block_steps)
        self.block_steps = self._sub_block_steps = 0
        self._refreshed = None

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

    # ------------------------------------------------------------------------------------------- pages come and go
    def adopt(self, tokens: int) -> None:
        """The first `tokens` tokens are in the row's pages already: they were found in the prefix cache."""
        assert self.committed == 0 and tokens <= self.encode_until, "only a row that has not begun adopts pages"
        self.state[:tokens] = COMMITTED
        self.committed = tokens
        if not any(self.forwards.values()):
            self.cached_tokens = tokens

    def preempt(self) -> None:
        """Forget the pages (the caller releases them): what was committed is encoded again before the row goes on."""
        caches = self._refresh_every > 1 and self._refreshed is not None
        self._replay = self._replay or (caches and self.phase is Phase.DENOISE)
        self.encode_until = max(self.encode_until, self.committed)
        self.state[: self.committed] = DECIDED
        self.committed = 0
        self.pages, self.keys, self.states = [], [], {}

    # ------------------------------------------------------------------------------------------- what the caller gets
    def take_delta(self) -> tuple[tuple[int, ...], str]:
        """Final tokens and text that nobody has got yet, cut at sub-blocks; empty when there is nothing new."""
        if self.finish_reason is None and self._final() <= self._delivered:
            return (), ""
        tokens = tuple(self.tokens[self._delivered : self.frontier].tolist())
        self._delivered = self.frontier
        return tokens, self._text.take()

    def _final(self) -> int:
        """The position up to which tokens are worth telling."""
        return self.frontier // self.sub_block_size * self.sub_block_size

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
            cached_tokens=self.cached_tokens,
            mode=self.request.decode.mode,
            logprobs=self.logprobs(self.frontier - self.prompt_length),
        )


def _sizes(request: GenerationRequest, block_diffusion: BlockDiffusionConfig | None) -> tuple[int, int]:
    """(block, sub-block) in tokens; AR mode decodes blocks of one, and lossless mode like it."""
    assert request.decode.mode != "auto", "the engine chooses before it makes a row"
    if request.decode.mode in ("ar", "lossless"):
        return 1, 1
    assert block_diffusion is not None, "check_request refuses diffusion without a block-diffusion model"
    return block_diffusion.block_size, request.decode.sub_block_size or block_diffusion.sub_block_size


def _special_stops(stop_strings: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """A stop string that is a special token never shows in the text: it stops by id."""
    if not stop_strings:
        return frozenset()
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(special[stop] for stop in stop_strings if stop in special)
