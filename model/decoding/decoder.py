"""A round of decoding: pack the turns of many rows into one forward, choose tokens, and move every row on.

    turns -> Packed (ids, positions, pieces, slots that need a logit) -> forward -> Choices -> rows

A TwoTower model has a second network: its round is two of these, the clean tokens of all rows through the model, then
the canvases of all rows through `backbone.writer`, those included whose text the first forward has just completed.
Rows of different phases share the forward: prefill chunks, whole blocks, sub-blocks, commits and AR steps. The LM head
runs only on the slots that are decided from. The device is read once a round, for the choices of all rows together.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from model.backbone import Backbone
from model.cache import BlockCache
from model.decoding.choices import Choices, decide
from model.decoding.lossless import Draft, LosslessRow
from model.decoding.packing import Packed, Slots, Turn, pack
from model.decoding.requests import GenerationRequest, check_request
from model.decoding.row import MASKED, Phase, Query, Reveal, Row
from model.decoding.static_forward import StaticForward
from model.decoding.tower_rows import LosslessTowerRow, TowerRow
from model.errors import UserError
from model.kernels.fused import fused_forward
from model.packed_linear import can_pack, pack_linears
from model.pages import Key, chain_keys
from model.recurrence import is_recurrent

PAGE_SIZE = 32  # of a model that was not adapted
DEFAULT_TOKENS = 65_536  # the cache's default size, unless one row alone needs more


@dataclass(frozen=True)
class Outcome:
    """What a turn did. phase: as it is counted; reveals: the positions decided, with confidences, of the block that
    begins at block_start; error: why the row cannot go on. committed: tokens whose keys and values stay from now on.
    drafted, accepted (lossless mode): tokens that were verified, and those of them that stood.
    canvas: tokens that the second network ran for the row behind this query, in a denoising forward of the same round.
    """

    row: Row
    phase: Phase
    reveals: tuple[Reveal, ...] = ()
    block_start: int = 0
    error: str | None = None
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    canvas: int = 0


class Decoder:
    """The model, its paged cache and the round. One thread at a time.

    rows: how many run at once, for the cache's default size. max_length: longest prompt and answer together, in tokens
    (at most the model's context). pages: of one block each; by default room for all rows, but not for more than
    DEFAULT_TOKENS tokens. weights: on CPU, "model" computes in the model's own format, "int8" with quantised copies
    (see `model.kernels.fused`). kernels: whether CPU decoding may use our C++ forward; without it, or for an
    architecture it does not know, PyTorch runs the model, its linear layers replaced in place by packed ones.
    ban_mask_token: whether blocks are decided without the mask token in the distribution; the published reference
    leaves it in, which only parity tests want.

    model_s: seconds since the start that the model's forwards took, without packing and choices (on a GPU: until the
    calls returned). most_tokens, most_logits: the widest forward so far, and the most rows of logits of any.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        rows: int,
        max_length: int | None = None,
        pages: int | None = None,
        prefix_cache: bool = True,
        weights: str = "model",
        kernels: bool = True,
        ban_mask_token: bool = True,
    ) -> None:
        self.backbone = backbone
        self.max_length = max_length or backbone.context_length
        if self.max_length > backbone.context_length:
            bound = f"the context of {backbone.name}: at most {backbone.context_length}"
            raise UserError(f"max_length {max_length} exceeds {bound}.")
        model = backbone.model
        self.reader = backbone.reader
        if self.reader is None and is_recurrent(model):
            raise UserError(
                f"{backbone.name} has recurrent layers, whose states the pages do not hold: load it with "
                "model.loading.load_model, which has its rows keep them."
            )
        self.fused = fused_forward(model, weights) if kernels or weights == "int8" else None
        if self.fused is None and self.reader is None and can_pack(model):
            pack_linears(model)
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.logit_width = 0 if backbone.writer is None else max(backbone.writer.vocab_size, self.vocab_size)
        page_size = backbone.block_diffusion.block_size if backbone.block_diffusion else PAGE_SIZE
        self.writer = backbone.writer
        self.room = self.max_length + (page_size if self.writer is not None else 0)  # a canvas is never cut
        longest = -(-self.room // page_size)
        pages = pages or max(longest, min(rows * longest, DEFAULT_TOKENS // page_size))
        if pages < longest:
            raise UserError(
                f"pages {pages} of {page_size} tokens do not hold one row of {self.room}: "
                f"give at least {longest}, or a smaller max_length."
            )
        found = prefix_cache and self.reader is None  # a page that is found brings no states
        self.cache = BlockCache(pages, page_size, dtype=model.dtype, device=model.device, prefix_cache=found)
        self.mask_token_id = backbone.block_diffusion.mask_token_id if backbone.block_diffusion else None
        self.ban_mask_token = ban_mask_token
        static = model.device.type == "cuda" and self.reader is None
        self.static_forward = StaticForward(model, self.cache, rows) if static else None
        self.model_s = 0.0
        self.most_tokens = self.most_logits = 0
        if self.fused is not None:
            layers, heads, width = self.fused.cache_shape
            for _ in range(layers):
                self.cache.add_layer(heads, width, width)
        with torch.inference_mode():
            if self.reader is not None:
                self.reader.allocate(self.cache)
            else:
                self._forward(pack([], self.cache))  # allocates every layer's cache; fails early
        if self.writer is not None:
            self.writer.prepare(weights=weights, kernels=kernels)

    def check(self, request: GenerationRequest) -> None:
        """Raises UserError for a request that can never run here."""
        check_request(
            request,
            block_diffusion=self.backbone.block_diffusion,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            bos_token_id=self.backbone.tokenizer.bos_token_id,
        )

    # ------------------------------------------------------------------------------------------- rows and their pages
    def make_row(self, request: GenerationRequest) -> Row:
        """A row for a checked request, without pages yet. An empty prompt starts from bos."""
        backbone = self.backbone
        if not request.prompt_ids:
            request = replace(request, prompt_ids=(int(backbone.tokenizer.bos_token_id),))
        if request.decode.mode == "lossless":
            assert backbone.block_diffusion is not None, "check_request refuses it without a block-diffusion model"
            parts = (request, self.room, backbone.block_diffusion, backbone.tokenizer)
            if self.writer is None:
                return LosslessRow(*parts)
            return LosslessTowerRow(*parts, token_shift=self.writer.token_shift, whole=self.reader is not None)
        if self.writer is not None and request.decode.mode == "diffusion":
            assert backbone.block_diffusion is not None, "a model with a second network writes blocks"
            return TowerRow(
                request,
                self.room,
                backbone.block_diffusion,
                backbone.tokenizer,
                together=self.writer.together,
                token_shift=self.writer.token_shift,
            )
        return Row(request, self.room, backbone.block_diffusion, backbone.tokenizer)

    def pages_to_admit(self, row: Row) -> int:
        """Pages that a row without pages takes from the available ones to encode what it must and begin its block."""
        found = self._find(row)
        total = self.cache.pages_for(row.reach)
        return total - len(found) + self.cache.pool.needed(found)

    def admit(self, row: Row) -> None:
        """Give a row that begins, or begins again, the pages that hold its first blocks already."""
        found = self._find(row)
        self.cache.pool.share(found)
        row.pages = found
        row.keys = self._keys(row, len(found) * self.cache.page_size)
        row.adopt(len(found) * self.cache.page_size)

    def missing_pages(self, turn: Turn) -> int:
        """Pages that the row lacks for this turn."""
        return max(0, self.cache.pages_for(max(turn.query.end, turn.query.reach)) - len(turn.row.pages))

    def supply(self, turn: Turn) -> None:
        """Take the pages that the turn needs. Raises IndexError when they are not available."""
        for _ in range(self.missing_pages(turn)):
            turn.row.pages.append(self.cache.pool.take())

    def preempt(self, row: Row) -> None:
        """Take a row's pages away; it goes on exactly where it was once it is admitted again."""
        self.cache.pool.release(row.pages)
        row.preempt()

    def release(self, row: Row) -> None:
        """Give the row's pages back, finished or not."""
        self.cache.pool.release(row.pages)
        row.pages = []

    def _find(self, row: Row) -> list[int]:
        """Pages in the prefix cache that hold the row's first blocks. A prompt's last logit must still be computed."""
        undecided = row.heads and row.encode_until < row.end and row.state[row.encode_until] == MASKED
        return self.cache.pool.find(self._keys(row, row.encode_until - int(undecided)))

    def _keys(self, row: Row, tokens: int) -> list[Key]:
        return chain_keys(self._salt(row.span), row.tokens[:tokens], self.cache.page_size)

    def salts(self) -> dict[str, Key]:
        """The first key of the chains in the prefix cache, by decoding mode."""
        salts = {"ar": self._salt(1), "lossless": self._salt(1)}
        if self.backbone.block_diffusion is not None:
            span = 1 if self.writer is not None else self.backbone.block_diffusion.block_size
            salts["diffusion"] = self._salt(span)
        return salts

    def _salt(self, span: int) -> Key:
        """Everything but the tokens that keys and values depend on."""
        backbone = self.backbone
        what = (backbone.name, backbone.revision, str(self.cache.dtype), self.cache.page_size, span)
        return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()

    def _publish(self, row: Row) -> None:
        """Let others find the row's blocks that are committed now."""
        size = self.cache.page_size
        for index in range(len(row.keys), row.committed // size):
            parent = row.keys[-1] if row.keys else self._salt(row.span)
            row.keys += chain_keys(parent, row.tokens[index * size : (index + 1) * size], size)
            self.cache.pool.publish(row.pages[index], row.keys[index])

    # ------------------------------------------------------------------------------------------- the round
    def step(self, turns: Sequence[Turn], *, publish: bool = True) -> list[Outcome]:
        """Run one forward over all turns and apply what it decided; one outcome a turn. Supplies pages that lack.

        publish: whether the prefix cache learns of the blocks that were committed.
        """
        for turn in turns:
            self.supply(turn)
        apart = self.writer is not None and not self.writer.together
        outcomes = self._run_towers(turns) if apart else self._run(turns)
        for outcome in outcomes:
            if outcome.error is not None:
                self.cache.forget(outcome.row.pages[len(outcome.row.keys) :])
            elif publish:
                self._publish(outcome.row)
        return outcomes

    def _run_towers(self, turns: Sequence[Turn]) -> list[Outcome]:
        """The model's forward, then the second network's: of rows that had asked for it, or ask now."""
        reading = [turn for turn in turns if not turn.query.noisy]
        read = self._run(reading) if reading else []
        going_on = [Turn(outcome.row) for outcome in read if outcome.error is None and _writes_now(outcome.row)]
        writing = [turn for turn in turns if turn.query.noisy] + going_on
        written = self._run(writing) if writing else []
        by_row = {id(outcome.row): outcome for outcome in read}
        for turn, outcome in zip(writing, written, strict=True):
            before = by_row.get(id(turn.row))
            by_row[id(turn.row)] = outcome if before is None else _joined(before, outcome, len(turn.query))
        return [by_row[id(turn.row)] for turn in turns]

    def _run(self, turns: Sequence[Turn]) -> list[Outcome]:
        """One forward over all turns, which are for one network, or for both where they are the same."""
        with torch.inference_mode():
            packed = pack(turns, self.cache)
            started = time.perf_counter()
            if _has_canvas(turns):
                logits = self._forward_noisy(turns, packed)
            else:
                logits = self._forward(packed) if self.reader is None else self.reader(turns, packed)
            self.model_s += time.perf_counter() - started
            if logits.shape[1] < self.logit_width:  # the second network may know a mask token that the model does not
                logits = pad(logits, (0, self.logit_width - logits.shape[1]), value=-torch.inf)
            self.most_tokens = max(self.most_tokens, packed.plan.where.shape[0])
            self.most_logits = max(self.most_logits, logits.shape[0])
            choices = decide(turns, packed.slots, logits, self.mask_token_id if self.ban_mask_token else None)
        bounds = np.searchsorted(packed.slots.turn, np.arange(len(turns) + 1))
        outcomes = [
            _apply(turn, packed.slots, choices, range(bounds[i], bounds[i + 1])) for i, turn in enumerate(turns)
        ]
        if self.reader is not None and not _has_canvas(turns):
            with torch.inference_mode():
                self.reader.settle(turns, self.cache)
        return outcomes

    def _forward_noisy(self, turns: Sequence[Turn], packed: Packed) -> Tensor:
        """Logits [N, V] of a forward with canvases of the second network in it."""
        assert self.writer is not None, "only a model with a second network has canvases"
        queries = [turn.query for turn in turns]
        times = torch.tensor([query.time for query in queries], dtype=torch.float64)
        parts = [np.where(np.arange(q.start, q.end) < _clean_until(q), -1, i) for i, q in enumerate(queries)]
        time_of = torch.from_numpy(np.concatenate(parts))
        if all(query.noisy for query in queries):
            return self.writer(packed, times, time_of, [turn.row.states for turn in turns])
        return self.writer.mixed(packed, times, time_of)

    def _forward(self, packed: Packed) -> Tensor:
        """Logits [N, V] of the slots."""
        if self.fused is not None:
            return self._forward_fused(packed)
        if self.static_forward is not None:
            return self.static_forward(packed)
        output = self.backbone.model(
            input_ids=packed.ids,
            position_ids=packed.positions,
            use_cache=False,
            attention_plan=packed.plan,
            logits_to_keep=packed.read,
        )
        logits: Tensor = output.logits[0, : len(packed.slots.read)]
        return logits

    def _forward_fused(self, packed: Packed) -> Tensor:
        assert self.fused is not None
        pieces, tables = packed.plan.descriptors
        return self.fused(
            packed.ids,
            packed.positions,
            pieces,
            tables,
            self.cache.page_size,
            packed.plan.where,
            self.cache.keys,
            self.cache.values,
            packed.read[: len(packed.slots.read)],
        )


def _has_canvas(turns: Sequence[Turn]) -> bool:
    return any(turn.query.noisy_from is not None for turn in turns)


def _clean_until(query: Query) -> int:
    return query.end if query.noisy_from is None else query.noisy_from


def _writes_now(row: Row) -> bool:
    """Whether a row whose text the model has just read may write behind it in the same round."""
    return (
        isinstance(row, TowerRow | LosslessTowerRow)
        and row.phase is Phase.DENOISE
        and row.request.decode.fused != "off"
    )


def _joined(read: Outcome, written: Outcome, canvas: int) -> Outcome:
    """What a row did in both forwards of a round; where both decide tokens of the answer, they are of one block."""
    return replace(
        read,
        reveals=read.reveals + written.reveals,
        block_start=read.block_start if read.reveals else written.block_start,
        error=written.error,
        canvas=canvas,
    )


def _apply(turn: Turn, slots: Slots, choices: Choices, mine: range) -> Outcome:
    """Move one row on by what its slots decided."""
    row, query = turn.row, turn.query
    if np.isnan(choices.confidence[mine]).any():
        where = int(slots.position[mine[0]])
        why = f"The model's logits are not finite at position {where}: its weights may be damaged."
        return Outcome(row, query.phase, error=why)
    before = row.committed
    opened = [
        Reveal(int(slots.position[i]), int(choices.token[i]), float(choices.confidence[i]), choices.logprobs.get(i))
        for i in mine
        if choices.opens[i]
    ]
    if isinstance(row, LosslessRow):
        return _apply_lossless(row, query, opened, _draft(query, choices, slots, mine))
    head = opened.pop(0) if query.head else None
    guess = int(choices.token[mine[-1]]) if query.guess else None
    counted = row.apply(query, head, opened, guess)
    phase = Phase.DENOISE if counted else query.phase
    revealed = counted if head is None else (head, *counted)
    return Outcome(row, phase, revealed, query.block_start, committed=row.committed - before)


def _apply_lossless(row: LosslessRow, query: Query, written: Sequence[Reveal], draft: Draft) -> Outcome:
    before, accepted = row.committed, row.accepted
    counted = row.verify(query, written, draft)
    return Outcome(
        row,
        query.phase,
        counted,
        query.block_start,
        committed=row.committed - before,
        drafted=query.drafted,
        accepted=row.accepted - accepted,
    )


def _draft(query: Query, choices: Choices, slots: Slots, mine: range) -> Draft:
    """What the turn's masks drafted."""
    if not query.drafts:
        return Draft()
    drafted = mine[len(mine) - query.drafts :]
    return Draft(choices.token[drafted.start : drafted.stop], choices.drafted_from.get(int(slots.turn[mine[0]])))
