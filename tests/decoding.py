"""Helpers of the decoding tests: a model with spread confidences, requests, and a decoder that is slow and obvious.

`naive_decode` follows METHOD section 2 literally: no cache, one dense mask over the whole row, Python loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from model.config import DecodeConfig
from model.decoding import GenerationRequest, GenerationResult, SamplingParams
from tests.oracles import logits_of
from tests.tiny import build_tiny_model

BLOCK, SUB_BLOCK, MASK = 8, 4, 3
EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK]
ENTRY = {"block_size": BLOCK, "mask_token_id": MASK, "sub_block_size": SUB_BLOCK}


def sharp_backbone(folder: Path, dtype: torch.dtype = torch.float32) -> Backbone:
    """A tiny Llama with wide weights, so that its confidences are spread: the median is about 0.35."""
    build_tiny_model(folder, initializer_range=0.5, block_diffusion=ENTRY)
    return load_backbone(folder, dtype=dtype)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random byte tokens of the tiny tokenizer."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return tuple(torch.randint(11, 267, (length,), generator=generator).tolist())


def make_request(
    name: str, prompt: Sequence[int], max_tokens: int, *, stop: Iterable[int] = (), **fields: Any
) -> GenerationRequest:
    """A request; DecodeConfig's and SamplingParams' fields by name; not fused, and without a policy threshold 0.4."""
    decode = {k: fields.pop(k) for k in list(fields) if k in DecodeConfig.__dataclass_fields__}
    sampling = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__dataclass_fields__}
    return GenerationRequest(
        id=name,
        prompt_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(**sampling),
        decode=DecodeConfig(**{"fused": "off", **({} if "policy" in decode else {"threshold": 0.4}), **decode}),
        stop_token_ids=frozenset(stop),
        **fields,
    )


def answer(backbone: Backbone, request: GenerationRequest, **config: Any) -> GenerationResult:
    """The result of a request that is alone in a fresh engine."""
    (result,) = generate_all(Engine(backbone, EngineConfig(**config)), [request])
    return result


def answers(backbone: Backbone, requests: Sequence[GenerationRequest], **config: Any) -> dict[str, tuple[int, ...]]:
    """Token ids by request id, all in one engine."""
    results = generate_all(Engine(backbone, EngineConfig(**config)), requests)
    return {r.id: r.token_ids for r in results}


def renamed(request: GenerationRequest, name: str) -> GenerationRequest:
    return replace(request, id=name)


def mixed_requests() -> list[GenerationRequest]:
    """Every kind of row at once: lengths around block edges, policies, AR, sampling, the sub-block cache."""
    kinds: list[dict[str, Any]] = [
        {},
        {"mode": "ar"},
        {"policy": "sequential"},
        {"policy": "static", "steps": 3},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "top_p": 0.7, "seed": 6},
        {"mode": "ar", "temperature": 1.0, "top_k": 5, "seed": 7},
        {"refresh": "sub_block"},
        {"sub_block_size": 8},
        {"sub_block_size": 1, "threshold": 0.2},
        {"fused": "masked_head"},
        {"fused": "speculative"},
        {"fused": "speculative", "refresh": "sub_block"},
        {"fused": "masked_head", "temperature": 0.9, "seed": 8},
        {"refresh": "every:2", "sub_block_size": 8},
        {"policy": "factor"},
        {"policy": "frechet", "budget": 0.9},
        {"policy": "entropy", "gamma": 0.8, "temperature": 0.7, "min_p": 0.1, "seed": 8},
        {"policy": "dimple", "gamma": 0.5, "steps": 4},
        {"policy": "prophet", "refresh": "sub_block", "fused": "speculative"},
        {"policy": "budgeted", "gamma": 0.5, "steps": 4, "fused": "speculative"},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.9, "seed": 9, "logprobs": 20},
        {"logit_bias": ((40, 5.0), (41, -100.0)), "repetition_penalty": 0.8, "logprobs": 0, "fused": "masked_head"},
        {"mode": "ar", "repetition_penalty": 1.2, "frequency_penalty": -0.5, "min_p": 0.05, "temperature": 1.1},
        {"mode": "lossless", "policy": "threshold"},
        {"mode": "lossless", "temperature": 1.2, "seed": 10, "fused": "speculative", "logprobs": 1},
        {"mode": "lossless", "temperature": 1.5, "top_p": 0.9, "seed": 11, "fused": "speculative"},
    ]
    lengths = [*EDGES, 40, 61, *EDGES[1:6], *EDGES, 33, 60, 9, 16, 35]
    return [
        make_request(f"r{i}", prompt_of(n, i), 5 + 3 * i % 20, **k)
        for i, (n, k) in enumerate(zip(lengths, kinds, strict=True))
    ]


# ------------------------------------------------------------------------------------------------- the oracle
@dataclass
class NaiveRow:
    """Ids and an explicit masked array over the row, as far as it has been written."""

    ids: list[int]
    masked: list[bool]


def naive_decode(
    backbone: Backbone, request: GenerationRequest, *, masked_head: bool = False
) -> tuple[tuple[int, ...], list[int]]:
    """(token ids, steps per block) of a greedy threshold or sequential request, block by block without any cache.

    masked_head: the first step after a commit (or after a prompt of whole blocks) does not see the block's first token.
    Penalties and biases are followed too, counted literally.
    """
    prompt, decode = list(request.prompt_ids), request.decode
    limit = len(prompt) + request.max_tokens
    row = NaiveRow(list(prompt), [False] * len(prompt))
    steps: list[int] = []
    start = len(prompt) // BLOCK * BLOCK
    while True:
        while len(row.ids) < start + BLOCK:
            row.ids.append(MASK)
            row.masked.append(True)
        if start and row.masked[start]:
            row.ids[start], _ = _choice(_naive_logits(backbone, row.ids[:start], start)[-1], request, row)
            row.masked[start] = False
        taken = 0
        while not _naive_end(request, row, len(prompt), limit) and any(row.masked[start:]):
            hidden = masked_head and not taken and start >= len(prompt)
            _naive_step(backbone, row, start, decode.sub_block_size or SUB_BLOCK, request, hidden)
            taken += 1
        if taken:
            steps.append(taken)
        if end := _naive_end(request, row, len(prompt), limit):
            return tuple(row.ids[len(prompt) : end]), steps
        start += BLOCK


def _naive_step(
    backbone: Backbone, row: NaiveRow, start: int, sub_block: int, request: GenerationRequest, head_hidden: bool
) -> None:
    first = row.masked.index(True) // sub_block * sub_block
    slots = [p for p in range(first, first + sub_block) if row.masked[p]]
    seen = [*row.ids[:start], MASK, *row.ids[start + 1 :]] if head_hidden else row.ids
    logits = _naive_logits(backbone, seen, start)
    choices = {p: _choice(logits[p - 1], request, row) for p in slots}
    if request.decode.policy == "sequential":
        opened = slots[:1]
    else:
        best = max(slots, key=lambda p: (choices[p][1], -p))
        opened = [p for p in slots if choices[p][1] > (request.decode.threshold or 0.9) or p == best]
    for p in opened:
        row.ids[p], row.masked[p] = choices[p][0], False


def _naive_end(request: GenerationRequest, row: NaiveRow, prompt: int, limit: int) -> int:
    """Where the answer ends, 0 when it does not yet."""
    for position in range(prompt, len(row.ids)):
        if row.masked[position]:
            return 0
        if row.ids[position] in request.stop_token_ids or position + 1 == limit:
            return position + 1
    return 0


def _naive_logits(backbone: Backbone, ids: list[int], start: int) -> Tensor:
    """Logits [T, V] of a row: every block sees the blocks before it and itself."""
    position = torch.arange(len(ids))
    block = position // BLOCK
    with torch.no_grad():
        return logits_of(backbone.model, torch.tensor(ids), position, block[:, None] >= block[None])


def _choice(logits: Tensor, request: GenerationRequest, row: NaiveRow) -> tuple[int, float]:
    """Most likely token and its probability, penalties and biases applied, the mask token banned."""
    logits, asked = logits.clone(), request.sampling
    text = [token for token, masked in zip(row.ids, row.masked, strict=True) if not masked]
    answer = [t for p, t in enumerate(row.ids) if p >= len(request.prompt_ids) and not row.masked[p]]
    for token in set(text):
        logits[token] *= asked.repetition_penalty if logits[token] < 0 else 1 / asked.repetition_penalty
    for token in set(answer):
        logits[token] -= asked.presence_penalty + asked.frequency_penalty * answer.count(token)
    for token, bias in asked.logit_bias:
        logits[token] += bias
    logits[MASK] = -torch.inf
    probability, token = logits.softmax(-1).max(-1)
    return int(token), float(probability)
