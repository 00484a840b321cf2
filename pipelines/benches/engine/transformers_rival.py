"""transformers `generate` as a contestant: greedy, SDPA attention, same weights, number format, threads, stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from model.backbone import DTYPES
from model.decoding import GenerationRequest
from model.packed_linear import can_pack, pack_linears
from pipelines.benches.engine.contestants import Answers
from pipelines.benches.engine.setting import Setting
from pipelines.benches.result import device_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_rival(setting: Setting, *, packed: bool) -> PreTrainedModel:
    """The setting's weights as transformers decodes them; packed: with the packed products that our engine uses."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        setting.folder, dtype=DTYPES[setting.config.dtype], attn_implementation="sdpa", use_safetensors=True
    )
    model.to(device_name()).eval()
    if packed and can_pack(model):
        pack_linears(model)
    return model


@dataclass
class TransformersContestant:
    """One request after another through `generate`."""

    model: PreTrainedModel
    requests: Sequence[GenerationRequest]
    answers: Answers = ()

    def run(self) -> None:
        self.answers = [self._answer(request) for request in self.requests]

    def _answer(self, request: GenerationRequest) -> tuple[int, ...]:
        ids = torch.tensor([request.prompt_ids], device=self.model.device)
        self.model.generation_config = GenerationConfig(  # the model's own would fill in what is left out
            do_sample=False,
            max_new_tokens=request.max_tokens,
            eos_token_id=sorted(request.stop_token_ids) or None,
            pad_token_id=0,
        )
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids))
        return tuple(out[0, ids.shape[1] :].tolist())
