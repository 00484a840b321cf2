"""A round of decoding: pack the turns of many rows into one forward, choose tokens, and move every row on.

    turns -> Packed (ids, positions, pieces, slots that need a logit) -> forward -> Choices -> rows

Rows of different phases share the forward: prefill chunks, whole blocks, sub-blocks, commits and AR steps. The LM head
runs only on the slots that are decided from. The device is read once a round, for the choices of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model.backbone import Backbone
from model.cache import BlockCache
from model.decoding.choices import Choices, decide
from model.decoding.packing import Packed, Slots, Turn, pack
from model.decoding.requests import GenerationRequest, check_request
from model.decoding.row import Phase, Reveal, Row
from model.errors import UserError
from model.packed_linear import can_pack, pack_linears


@dataclass(frozen=True)
class Outcome:
    """What a turn did. reveals: the positions decided, with confidences; error: why the row cannot go on."""

    row: Row
    phase: Phase
    reveals: tuple[Reveal, ...] = ()
    error: str | None = None


class Decoder:
    """The model, its cache and the round. Rows are admitted into a free slot and released; one thread at a time.

    rows: how many run at once. max_length: longest prompt and answer together, in tokens (at most the model's context).
    pack_weights: on CPU, multiply with packed copies of the linear layers, which replace the model's own in place (see
    `model.packed_linear`). ban_mask_token: whether blocks are decided without the mask token in the distribution; the
    published reference leaves it in, which only parity tests want.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        rows: int,
        max_length: int | None = None,
        pack_weights: bool = True,
        ban_mask_token: bool = True,
    ) -> None:
        self.backbone = backbone
        self.max_length = max_length or backbone.context_length
        if self.max_length > backbone.context_length:
            bound = f"the context of {backbone.name}: at most {backbone.context_length}"
            raise UserError(f"max_length {max_length} exceeds {bound}.")
        model = backbone.model
        if pack_weights and can_pack(model):
            pack_linears(model)
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.cache = BlockCache(rows, self.max_length, dtype=model.dtype, device=model.device)
        self.mask_token_id = backbone.block_diffusion.mask_token_id if backbone.block_diffusion else None
        self.ban_mask_token = ban_mask_token
        with torch.inference_mode():
            self._forward(pack([], self.cache, self.mask_token_id))  # allocates every layer's cache; fails early

    def check(self, request: GenerationRequest) -> None:
        """Raises UserError for a request that can never run here."""
        check_request(
            request,
            block_diffusion=self.backbone.block_diffusion,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            bos_token_id=self.backbone.tokenizer.bos_token_id,
        )

    def admit(self, request: GenerationRequest) -> Row:
        """A row for a checked request; `cache.free` says how many fit. An empty prompt starts from bos."""
        backbone = self.backbone
        if not request.prompt_ids:
            request = replace(request, prompt_ids=(int(backbone.tokenizer.bos_token_id),))
        return Row(request, self.cache.take(), self.max_length, backbone.block_diffusion, backbone.tokenizer)

    def release(self, row: Row) -> None:
        """Give the row's slot back, finished or not."""
        self.cache.give_back(row.slot)

    def step(self, turns: Sequence[Turn]) -> list[Outcome]:
        """Run one forward over all turns and apply what it decided; one outcome a turn."""
        with torch.inference_mode():
            packed = pack(turns, self.cache, self.mask_token_id)
            logits = self._forward(packed)
            choices = decide(turns, packed.slots, logits, self.mask_token_id if self.ban_mask_token else None)
        bounds = np.searchsorted(packed.slots.turn, np.arange(len(turns) + 1))
        return [
            _apply(turn, phase, packed.slots, choices, range(bounds[i], bounds[i + 1]))
            for i, (turn, phase) in enumerate(zip(turns, packed.phases, strict=True))
        ]

    def _forward(self, packed: Packed) -> Tensor:
        """Logits [N, V] of the slots."""
        output = self.backbone.model(
            input_ids=packed.ids,
            position_ids=packed.positions,
            use_cache=False,
            attention_plan=packed.plan,
            logits_to_keep=packed.read,
        )
        logits: Tensor = output.logits[0, : len(packed.slots.read)]
        return logits


def _apply(turn: Turn, phase: Phase, slots: Slots, choices: Choices, mine: range) -> Outcome:
    """Move one row on by what its slots decided."""
    row = turn.row
    if np.isnan(choices.confidence[mine]).any():
        where = int(slots.position[mine[0]])
        why = f"The model's logits are not finite at position {where}: its weights may be damaged."
        return Outcome(row, phase, error=why)
    opened = [i for i in mine if choices.opens[i]]
    reveals = tuple(
        Reveal(int(slots.position[i]), int(choices.token[i]), float(choices.confidence[i]), choices.logprobs.get(i))
        for i in opened
    )
    row.keep_logprobs(reveals)
    if phase is Phase.DENOISE:
        row.revealed(reveals)
    elif phase is Phase.COMMIT:
        row.block_committed(reveals[0].token)
    else:
        row.prefilled(turn.count, reveals[0].token if reveals else None)
    return Outcome(row, phase, reveals)
