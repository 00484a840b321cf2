"""Rows of a TwoTower model: the context tower reads them causally, the denoiser fills canvases of S slots behind.

    [cccccccc uudu]   c committed: in the pages, read by the context tower; the canvas begins right behind the prompt
             ^        or the last block, wherever that is, and always has S slots

A row runs in one tower at a time. What it asks for next, after the context tower has read, the decoder runs in the same
round (`Decoder.step`), unless the request says `fused: off`: a commit and the next block's first step, or verifying one
draft and writing the next. Nothing the denoiser writes into the pages is ever committed; the context tower's tokens
overwrite it. Source: TwoTower (arXiv 2606.26493), Algorithm 1; lossless mode is ours, see `model.two_tower.lossless`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from model.config import BlockDiffusionConfig
from model.decoding.lossless import Draft, LosslessRow
from model.decoding.requests import GenerationRequest
from model.decoding.row import MASKED, Phase, Query, Reveal, Row


class TowerRow(Row):
    """Writes blocks: PREFILL and COMMIT are the context tower's, DENOISE the denoiser's.

    token_shift: the context tower's last logit decides a block's first slot, as in `Row`; else no commit decides any.

    together: both are one network (`denoiser: lora`), which runs a commit and the next block's first step in one
    forward.
    """

    def __init__(
        self,
        request: GenerationRequest,
        max_length: int,
        block_diffusion: BlockDiffusionConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        together: bool = False,
        token_shift: bool = False,
    ) -> None:
        super().__init__(request, max_length, block_diffusion, tokenizer)
        self.heads = token_shift
        self._together = together and request.decode.fused != "off" and not token_shift

    def _block_at(self, position: int) -> int:
        return self.prompt_length + (position - self.prompt_length) // self.block_size * self.block_size

    @property
    def causal(self) -> bool:
        return False

    @property
    def span(self) -> int:
        return 1

    def next_query(self, tokens: int = 0) -> Query:
        phase = self.phase
        assert phase is not Phase.DONE, "the row has finished"
        if phase is Phase.DENOISE:
            return self._with_canvas(phase, self.committed)
        start = self.committed
        keep = self.block_end if phase is Phase.COMMIT else min(start + tokens, self.encode_until)
        follows = keep >= self.encode_until and keep < self.end
        if follows and self._together:
            return self._with_canvas(phase, keep)
        reach = keep + self.block_size if follows else 0
        head = self.heads and follows and self.state[keep] == MASKED
        return Query(phase, start, keep, keep, self.tokens[start:keep], head=head, block_start=keep, reach=reach)

    def _with_canvas(self, phase: Phase, begin: int) -> Query:
        """The canvas at `begin`, and the clean tokens before it that are still to be read."""
        end, taken = begin + self.block_size, 0 if phase is Phase.COMMIT else self.block_steps
        masked = begin + np.flatnonzero(self.state[begin:end] == MASKED)
        steps = min(self.request.decode.steps or self.block_size, self.block_size)
        return Query(
            phase,
            self.committed,
            begin,
            end,
            np.concatenate([self.tokens[self.committed : begin], self._canvas(begin, end)]),
            candidates=masked,
            block_start=begin,
            step=taken,
            steps_left=max(1, steps - taken),
            progress=self._progress(begin, end),
            noisy_from=begin,
            time=len(masked) / self.block_size,
            shift=int(self.heads),
        )

    def _final(self) -> int:
        return self.frontier


class LosslessTowerRow(LosslessRow):
    """Writes AR mode's answer: the denoiser drafts behind the last decided token, one read of the context tower says
    which of it stands and what follows. Both see the text itself, never an unverified draft.

    whole: the canvas has all S slots, however few of them are read, as rows need that share a forward with their
    states; else it has the slots that are drafted, and costs no more than they do. Its time is that of S slots anyway.
    """

    def __init__(
        self,
        request: GenerationRequest,
        max_length: int,
        block_diffusion: BlockDiffusionConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        token_shift: bool = False,
        whole: bool = False,
    ) -> None:
        super().__init__(request, max_length, block_diffusion, tokenizer)
        self._shift = int(token_shift)
        self._whole = whole
        self._kept: list[int] = []  # tokens that each verification decided
        self._length = draft_length(self._kept, self._longest)

    @property
    def reach(self) -> int:
        return self.encode_until + self._longest + 1

    def next_query(self, tokens: int = 0) -> Query:
        if self.phase is not Phase.DENOISE:
            return super().next_query(tokens)
        start = self.frontier - 1  # of the token that was decided last, the canvas's only clean one
        drafts = self._room(start + 1)
        ids = np.full(1 + (self._longest if self._whole else drafts), self._mask_token_id)
        ids[0] = self.tokens[start]
        return Query(
            Phase.DENOISE,
            start,
            start + 1,
            start + len(ids),
            ids,
            block_start=start + 1,
            drafts=drafts,
            noisy_from=start,
            time=self._longest / (self._longest + 1),
            shift=self._shift,
        )

    def _with_masks(self, query: Query) -> Query:
        """The draft comes from the other tower, once it is known what it continues."""
        return replace(query, reach=query.keep + self._longest + 1)

    def _room(self, keep: int) -> int:
        return min(self._length, self.limit - keep - 1)

    def verify(self, query: Query, written: Sequence[Reveal], draft: Draft) -> tuple[Reveal, ...]:
        if query.noisy:
            self.forwards[query.phase] += 1
            self.draft = draft
            return ()
        counted = super().verify(query, written, Draft())
        if query.drafted:
            self._kept.append(len(counted))
            self._length = draft_length(self._kept, self._longest)
        return counted


def draft_length(kept: Sequence[int], most: int) -> int:
    """How many drafted slots to read next, 1 to `most`: twice the mean of what the last four rounds kept, and one more.

    kept: tokens that each round decided, the one behind its draft included.
    """
    recent = [count - 1 for count in kept[-4:]]
    return most if not recent else min(most, max(1, 1 + -(-2 * sum(recent) // len(recent))))
