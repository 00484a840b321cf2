"""A row in lossless mode: AR mode's answer, from drafts that the same weights write as a block and then verify.

One causal cache, AR mode's own. A forward runs up to three parts of the row:

    [cccc h dddd mmmm]     h  the token decided last: its keys and values are not in the cache yet
          ^ committed      d  the draft so far: verified here, causally
                           m  masks: a block that sees all that stands before it and itself; it drafts

The logits of h and d are AR mode's. Those tokens d that AR would have written stand, and the token that AR writes
behind them is decided. Then:

    all of d stands        the masks have drafted the tokens behind the decided one: the next forward verifies them
    some d does not        what the masks drafted is thrown away; the next forward has no d and only drafts
    there is no d          h alone is an AR step, so a drafting forward decides a token too

What is not committed is written again by the next forward, and only whole committed pages are ever published, so a
rejected draft leaves nothing behind. `fused: off` never drafts while it verifies. The draft's length follows what the
last verification accepted, so it is the row's own history and nothing else: neighbours, pages and prompts found in the
cache change no draft, hence no draw either. A row that loses its pages keeps its draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from model.config import BlockDiffusionConfig
from model.decoding.requests import GenerationRequest, GenerationResult
from model.decoding.row import COMMITTED, NONE, Phase, Query, Reveal, Row

FIRST_DRAFT = 4  # tokens, before anything is known of the row
GROWTH = 2  # tokens that a draft grows by when all of the last one stood


@dataclass(frozen=True)
class Draft:
    """Tokens int64 [n] that nobody has verified; q: [n, V], the distributions they were drawn from, None where they are
    the most likely ones (greedy rows)."""

    tokens: np.ndarray = field(default_factory=lambda: NONE)
    q: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)


class LosslessRow(Row):
    """drafted, accepted: tokens that were verified so far, and those of them that stood."""

    def __init__(
        self,
        request: GenerationRequest,
        max_length: int,
        block_diffusion: BlockDiffusionConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._forced: int | None = None
        super().__init__(request, max_length, block_diffusion, tokenizer)
        self._longest = block_diffusion.block_size - 1  # h and the masks are one block
        self._length = min(FIRST_DRAFT, self._longest)
        self._fused = request.decode.fused != "off"
        self.draft = Draft()
        self.drafted = self.accepted = 0

    def _take_over(self, answered: tuple[int, ...]) -> None:
        """A draw hangs on drafts that went with the other engine: the last token, which is decided again, is given."""
        super()._take_over(answered)
        if answered and not self.request.sampling.greedy:
            self._forced = answered[-1]

    # ------------------------------------------------------------------------------------------- what is needed next
    @property
    def reach(self) -> int:
        return min(super().reach + self._length, self.end)

    @property
    def phase(self) -> Phase:
        """DENOISE is a forward that only drafts, COMMIT one that verifies, or an AR step where no draft has room."""
        phase = super().phase
        drafts = phase is Phase.COMMIT and not len(self.draft) and self._room(self.frontier) > 0
        return Phase.DENOISE if drafts else phase

    def next_query(self, tokens: int = 0) -> Query:
        phase = self.phase
        if phase is Phase.PREFILL:
            chunk = super().next_query(tokens)
            return self._with_masks(chunk) if chunk.head else chunk
        keep = self.frontier + len(self.draft)
        ids = np.concatenate([self.tokens[self.committed : self.frontier], self.draft.tokens])
        query = Query(
            phase, self.committed, keep, keep, ids, head=True, block_start=self.frontier, drafted=len(self.draft)
        )
        return self._with_masks(query) if self._fused or not len(self.draft) else query

    def _with_masks(self, query: Query) -> Query:
        """The query with the block behind it that drafts."""
        count = self._room(query.keep)
        if count <= 0:
            return query
        ids = np.concatenate([query.ids, np.full(count, self._mask_token_id)])
        return replace(query, end=query.keep + count, ids=ids, drafts=count)

    def _room(self, keep: int) -> int:
        """Tokens to draft behind position `keep`. The answer's last one is never drafted: verifying decides it."""
        return min(self._length, self.end - keep - 2)

    # ------------------------------------------------------------------------------------------- what a forward brings
    def verify(self, query: Query, written: Sequence[Reveal], draft: Draft) -> tuple[Reveal, ...]:
        """Take in what the forward of `query` decided; returns the reveals that count.

        written: for each verified position and `keep`, the token that stands there if all drafted ones before it do;
        draft: what the masks drafted.
        """
        self.forwards[query.phase] += 1
        counted, stood = self._decide_written(written)
        self.committed = query.keep if query.phase is Phase.PREFILL else self.frontier - 1
        self.state[query.start : self.committed] = COMMITTED
        if query.drafted:
            self.drafted += query.drafted
            self.accepted += stood
            grown = stood == query.drafted
            self._length = min(self._length + GROWTH if grown else stood + 1, self._longest)
        if query.head:
            self.draft = draft if stood == query.drafted else Draft()
        return counted

    def _decide_written(self, written: Sequence[Reveal]) -> tuple[tuple[Reveal, ...], int]:
        """(what counts of `written`, how many drafted tokens stand)."""
        counted: list[Reveal] = []
        stood = 0
        for index, reveal in enumerate(written):
            if self._forced is not None:
                reveal, self._forced = replace(reveal, token=self._forced), None
            self._decide(reveal)
            counted.append(reveal)
            stands = index < len(self.draft) and reveal.token == int(self.draft.tokens[index])
            stood += int(stands)
            if self.finish_reason is not None or not stands:
                break
        return tuple(counted), stood

    # ------------------------------------------------------------------------------------------- what the caller gets
    def result(self) -> GenerationResult:
        return replace(super().result(), drafted_tokens=self.drafted, accepted_tokens=self.accepted)
