"""Answers of models that the engine does not run, those with recurrent layers: the plain loops of `model.two_tower`.

A loop decodes some requests together until the last of them ends, one batch after the other: no scheduler, no fused
forwards, no packed products. Speeds are to be compared among such models only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from model.backbone import Backbone, load_backbone, read_architecture
from model.decoding import GenerationRequest, GenerationResult
from model.errors import UserError
from model.loading import describe_model
from model.recurrence import describes_recurrent
from model.sources import fetch_model
from model.two_tower.config import OWN_CONTEXT, TwoTowerConfig
from model.two_tower.decoding import TowerAnswer, TowerRequest, write_blocks, write_tokens
from model.two_tower.folder import DENOISER, is_two_tower, load_two_tower, read_two_tower_config
from model.two_tower.lossless import write_lossless
from model.two_tower.published import is_published
from model.two_tower.towers import ContextTower, TwoTower

PAGE = 16  # tokens in a page of a model without blocks
Write = Callable[[TwoTower, Sequence[TowerRequest]], list[TowerAnswer]]
WRITERS: dict[str, Write] = {"ar": write_tokens, "diffusion": write_blocks, "lossless": write_lossless}


@dataclass(frozen=True)
class PlainLoops:
    """A model and how many requests it decodes together."""

    towers: TwoTower
    tokenizer: PreTrainedTokenizerBase
    rows: int

    def check(self, request: GenerationRequest) -> None:
        """Raises UserError for a request that the loops cannot run."""
        if request.stop_strings:
            raise UserError("stop strings are not known to the plain loops of recurrent models: leave stop out.")
        _asked(request)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """All answers, in the order asked; requests of one mode."""
        results = []
        for first in range(0, len(requests), self.rows):
            part = requests[first : first + self.rows]
            with torch.inference_mode():
                answers = WRITERS[part[0].decode.mode](self.towers, [_asked(request) for request in part])
            results += [self._result(*pair) for pair in zip(part, answers, strict=True)]
        return results

    def _result(self, request: GenerationRequest, answer: TowerAnswer) -> GenerationResult:
        shown = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        return GenerationResult(
            id=request.id,
            token_ids=answer.token_ids,
            text=self.tokenizer.decode(list(shown), skip_special_tokens=True),
            finish_reason=answer.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            forwards=dict(answer.forwards),
            steps_per_block=list(answer.steps_per_block),
            mode=request.decode.mode,
            accepted_tokens=sum(kept - 1 for kept in answer.accepted),
        )


def _asked(request: GenerationRequest) -> TowerRequest:
    return TowerRequest(
        request.prompt_ids, request.max_tokens, request.decode, request.sampling, request.stop_token_ids
    )


def has_recurrent_layers(source: str) -> bool:
    """Whether a model's layers carry states, which the engine does not keep; read from its configuration."""
    folder = fetch_model(source)
    if not is_two_tower(folder):
        return describes_recurrent(read_architecture(folder))
    if is_published(folder):
        return True
    if (folder / DENOISER).is_dir():
        return describes_recurrent(read_architecture(folder / DENOISER))
    config = read_two_tower_config(folder)
    return has_recurrent_layers(str(folder / OWN_CONTEXT if config.context == OWN_CONTEXT else config.context))


def load_plain_loops(source: str, rows: int, *, dtype: torch.dtype, device: str) -> tuple[Backbone, PlainLoops]:
    """A model with recurrent layers, two towers or one, as a backbone (its context tower) and its loops."""
    folder = fetch_model(source)
    if is_two_tower(folder):
        model = load_two_tower(source, dtype=dtype, device=device)
        described = describe_model(folder)
        backbone = replace(model.context, block_diffusion=described.block_diffusion)
        return backbone, PlainLoops(model.towers, model.tokenizer, rows)
    backbone = load_backbone(source, dtype=dtype, device=device)
    towers = TwoTower(ContextTower(backbone.model), None, TwoTowerConfig(PAGE, 0, context=source))
    return backbone, PlainLoops(towers, backbone.tokenizer, rows)
