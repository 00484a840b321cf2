"""A model that does exactly what a script says: which token each position gets, and with what confidence.

Its logits depend on the position alone, so a test knows what opens at which step without running the weights of
anything. It is shaped like a transformers model as far as the decoder looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from model.backbone import Backbone
from model.config import BlockDiffusionConfig
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

BLOCK, SUB_BLOCK, MASK = 8, 4, 3
Script = Callable[[int], tuple[int, float]]


class ScriptedModel(nn.Module):
    """script(position) -> (token, confidence) of the token at that position, read from the position before it."""

    def __init__(self, script: Script, context_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, 1)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=1))
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.forwards: list[int] = []  # tokens of each forward
        self.logits = torch.stack([self._logits(*script(p + 1)) for p in range(context_length)])

    @staticmethod
    def _logits(token: int, confidence: float) -> Tensor:
        """Log-probabilities over all tokens but the mask."""
        rest = (1.0 - confidence) / (VOCAB_SIZE - 2)
        logits = torch.full((VOCAB_SIZE,), max(rest, 1e-30)).log()
        logits[token] = torch.tensor(confidence).log()
        return logits

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **_: Any) -> SimpleNamespace:
        self.forwards.append(input_ids.shape[1])
        return SimpleNamespace(logits=self.logits[position_ids[0, logits_to_keep]][None])


def scripted_backbone(script: Script, context_length: int = 2048) -> Backbone:
    model: Any = ScriptedModel(script, context_length)
    return Backbone(
        model=model,
        tokenizer=tiny_tokenizer(),
        block_diffusion=BlockDiffusionConfig(BLOCK, MASK, sub_block_size=SUB_BLOCK),
        name="scripted",
        revision="0",
        context_length=context_length,
        stop_token_ids=frozenset({2}),
    )
