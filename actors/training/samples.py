"""What the model writes while it is trained: a few fixed prompts, continued with the weights of the moment.

The prompts are the first documents of the held-out rows, up to their first supervised token; what the document goes on
with stands beside the answer. Decoding is greedy, in blocks with the default policy (token by token for the next-token
control), and bounded by the number of prompts and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from actors.training.trained_model import rebuild
from model.backbone import Backbone
from model.config import DecodeConfig
from model.corruption import IGNORED
from model.decoding import GenerationRequest, GenerationResult
from model.layout import RowBatch
from model.recurrence import is_recurrent
from model.two_tower.config import TwoTowerConfig
from model.two_tower.decoding import TowerAnswer, TowerRequest, write_blocks, write_tokens
from model.two_tower.folder import TwoTowerModel
from model.two_tower.towers import ContextTower, TwoTower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGE_SIZE = 16  # tokens in a page, for a network without blocks
Write = Callable[[TwoTower, Sequence[TowerRequest]], list[TowerAnswer]]


@dataclass(frozen=True)
class Prompt:
    """The beginning of a held-out document and what follows it there, as token ids."""

    prompt: tuple[int, ...]
    reference: tuple[int, ...]


def prompts_of(rows: RowBatch, count: int, longest: int) -> list[Prompt]:
    """The first `count` documents, in the rows' order, that have an answer and whose prompt has 1 .. longest tokens."""
    found: list[Prompt] = []
    for prompt in _documents(rows):
        if len(found) == count:
            break
        if 1 <= len(prompt.prompt) <= longest:
            found.append(prompt)
    return found


def _documents(rows: RowBatch) -> Iterator[Prompt]:
    """Every document with a supervised token, cut before its first and behind its last."""
    for ids, labels, documents in zip(rows.input_ids, rows.labels, rows.document_ids, strict=True):
        for document in documents[documents >= 0].unique_consecutive():
            place = documents == document
            supervised = (labels[place] != IGNORED).nonzero()[:, 0].tolist()
            if supervised:
                tokens = ids[place].tolist()
                yield Prompt(tuple(tokens[: supervised[0]]), tuple(tokens[supervised[0] : supervised[-1] + 1]))


def write_samples(
    backbone: Backbone, weights: Mapping[str, Tensor], prompts: Sequence[Prompt], max_tokens: int
) -> list[dict[str, Any]]:
    """Continue every prompt by at most max_tokens tokens with whole weights (by name, see `gather_weights`).

    Returns {"sample", "prompt", "text", "reference", "token_ids", "finish_reason", "tokens_per_forward"} for each.
    """
    whole = replace(backbone, model=decodable(backbone.model, weights))
    if is_recurrent(whole.model):  # the plain loops know its states
        towers = TwoTower(ContextTower(whole.model), None, TwoTowerConfig(PAGE_SIZE, 0))
        return _tower_lines(TwoTowerModel(towers, whole), prompts, max_tokens, write_tokens)
    length = _room(backbone, max(len(one.prompt) for one in prompts) + max_tokens)
    engine = Engine(whole, EngineConfig(max_rows=len(prompts), max_length=length, prefix_cache=False, kernels=False))
    decode = DecodeConfig(mode="ar" if backbone.block_diffusion is None else "diffusion")
    requests = [
        GenerationRequest(str(i), one.prompt, max_tokens, decode=decode, stop_token_ids=backbone.stop_token_ids)
        for i, one in enumerate(prompts)
    ]
    results = generate_all(engine, requests)
    return [_line(i, one, result, backbone) for i, (one, result) in enumerate(zip(prompts, results, strict=True))]


def write_two_tower_samples(model: TwoTowerModel, prompts: Sequence[Prompt], max_tokens: int) -> list[dict[str, Any]]:
    """The same lines from two towers that are whole, by Algorithm 1. Greedy, with the default policy."""
    return _tower_lines(model, prompts, max_tokens, write_blocks)


def _tower_lines(
    model: TwoTowerModel, prompts: Sequence[Prompt], max_tokens: int, write: Write
) -> list[dict[str, Any]]:
    stops = model.context.stop_token_ids
    requests = [TowerRequest(one.prompt, max_tokens, stop_token_ids=stops) for one in prompts]
    with torch.no_grad():
        answers = write(model.towers, requests)
    lines = []
    for number, (one, answer) in enumerate(zip(prompts, answers, strict=True)):
        forwards = answer.forwards["denoise"] + answer.forwards["commit"]
        lines.append(
            {
                "sample": number,
                "prompt": str(model.tokenizer.decode(one.prompt)),
                "text": str(model.tokenizer.decode(answer.token_ids, skip_special_tokens=True)),
                "reference": str(model.tokenizer.decode(one.reference)),
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason,
                "tokens_per_forward": len(answer.token_ids) / forwards,
            }
        )
    return lines


def _room(backbone: Backbone, tokens: int) -> int:
    """Whole blocks, as everywhere else: a context that ends inside a block would cut the canvas."""
    block_size = backbone.block_diffusion.block_size if backbone.block_diffusion else 1
    return min(-(-tokens // block_size) * block_size, backbone.context_length)


def decodable(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model again with these weights, free of whatever DeepSpeed hung on it, ready to decode."""
    device = next(model.buffers(), next(model.parameters())).device
    fresh = rebuild(model, {name: tensor.to(device) for name, tensor in weights.items()})
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(fresh.get_submodule(owner), leaf, buffer)
    return fresh.eval()


def _line(number: int, one: Prompt, result: GenerationResult, backbone: Backbone) -> dict[str, Any]:
    def text(ids: Sequence[int]) -> str:
        return str(backbone.tokenizer.decode(ids))

    return {
        "sample": number,
        "prompt": text(one.prompt),
        "text": result.text,
        "reference": text(one.reference),
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "tokens_per_forward": result.tokens_per_forward,
    }
