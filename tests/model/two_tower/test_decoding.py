"""Algorithm 1 and AR mode for many requests: each as if it were alone, exact lengths, the base model's own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.config import DecodeConfig
from model.decoding.requests import SamplingParams
from model.errors import UserError
from model.two_tower.decoding import TowerRequest, log_likelihoods, write_blocks, write_tokens
from model.two_tower.reader import Reader, Stretch
from model.two_tower.towers import TwoTower
from tests.towers import BLOCK, MASK, VOCAB, by_decoding, shared_towers, tiny_decoder


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(4, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


def naive_blocks(towers: TwoTower, request: TowerRequest) -> list[int]:
    """Algorithm 1, literally: no batch, no cache kept from step to step, Python loops; greedy, budgeted."""
    ids, gamma, steps = list(request.prompt_ids), request.decode.gamma or 0.8, request.decode.steps or BLOCK
    end = len(ids) + request.max_tokens
    while len(ids) < end:
        canvas, masked = [MASK] * BLOCK, set(range(BLOCK))
        for step in range(steps):
            t = torch.tensor(len(masked) / BLOCK)
            logits = by_decoding(towers, torch.tensor(ids), torch.tensor(canvas), t).double()
            logits[:, MASK] = -torch.inf
            confidence, token = logits.softmax(-1).max(-1)
            order = sorted(masked, key=lambda slot: -float(confidence[slot]))
            sure = sum(float(confidence[slot]) > gamma for slot in masked)
            for slot in order[: max(sure, -(-len(masked) // (steps - step)))]:
                canvas[slot] = int(token[slot])
                masked.remove(slot)
            if not masked:
                break
        ids += canvas
    return ids[len(request.prompt_ids) : end]


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_rows_of_a_batch_equal_algorithm_1_run_literally(kind: str) -> None:
    towers = shared_towers(kind)
    decodes = [DecodeConfig(policy="budgeted", gamma=0.3, steps=s) for s in (None, 2, 3)]
    requests = [TowerRequest(p, n, d) for p, n, d in zip(prompts(3, 4, 9), (6, 9, 4), decodes, strict=True)]
    answers = write_blocks(towers, requests)
    assert [list(a.token_ids) for a in answers] == [naive_blocks(towers, r) for r in requests]
    assert [len(a.token_ids) for a in answers] == [6, 9, 4]
    for answer, request in zip(answers, requests, strict=True):
        assert max(answer.steps_per_block) <= (request.decode.steps or BLOCK)
        assert sum(answer.steps_per_block) == answer.forwards["denoise"]
        opened = sorted(p for block in answer.trace for step in block for p, _, _ in step)
        assert opened == list(range(len(request.prompt_ids), len(request.prompt_ids) + len(answer.written)))


@pytest.mark.parametrize("kind", ["qwen3", "granitemoehybrid"])
def test_a_request_alone_equals_the_same_request_in_a_batch(kind: str) -> None:
    towers = shared_towers(kind)
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling": SamplingParams(temperature=0.9, seed=3)},
        {"sampling": SamplingParams(temperature=1.2, top_p=0.8, top_k=20, seed=4)},
        {"decode": DecodeConfig(policy="entropy", gamma=0.5)},
    ]
    requests = [TowerRequest(p, 7, **k) for p, k in zip(prompts(2, 5, 8, 3), kinds, strict=True)]
    for mode in (write_blocks, write_tokens):
        together = mode(towers, requests)
        assert [mode(towers, [one])[0].token_ids for one in requests] == [a.token_ids for a in together]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "falcon_h1"])
def test_ar_mode_equals_generate_of_transformers_without_a_denoiser(kind: str) -> None:
    towers = shared_towers(kind)
    alone = TwoTower(towers.context, None, towers.config)
    model = tiny_decoder(kind)
    model.set_attn_implementation("sdpa")
    (prompt,) = prompts(7)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 7:]
    (answer,) = write_tokens(alone, [TowerRequest(prompt, 8)])
    assert list(answer.token_ids) == expected.tolist()
    assert answer.forwards == {"prefill": 1, "denoise": 0, "commit": 7}
    with pytest.raises(UserError, match="without its denoiser"):
        write_blocks(alone, [TowerRequest(prompt, 8)])


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_denoiser_on_another_device_attends_where_the_cache_lies(kind: str) -> None:
    """cpu:0 is another name of the same memory, which takes the way between two devices."""
    reader, stretch = Reader(shared_towers(kind), tokens=32, rows=1), Stretch()
    reader.extend([stretch], torch.arange(5, 12)[None])
    canvas, time = torch.full((1, BLOCK), MASK), torch.tensor([1.0])
    expected = reader.denoise([stretch], canvas, time)
    reader.cache.device = torch.device("cpu", 0)
    assert torch.equal(reader.denoise([stretch], canvas, time), expected)


def test_likelihoods_are_the_context_towers() -> None:
    towers = shared_towers("qwen2")
    model = tiny_decoder("qwen2")
    model.set_attn_implementation("sdpa")
    ids = prompts(9)[0]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    ours, nothing = log_likelihoods(towers, [ids, ids[:1]])
    assert ours == pytest.approx([float(expected[i, token]) for i, token in enumerate(ids[1:])], abs=1e-6)
    assert nothing == []


def test_a_stop_token_ends_its_own_row_only_and_what_stands_behind_it_is_cut() -> None:
    towers = shared_towers("llama")
    requests = [TowerRequest(p, 12) for p in prompts(3, 5)]
    free = write_blocks(towers, requests)
    stop = free[0].token_ids[5]
    first = free[0].token_ids.index(stop)
    stopping = [TowerRequest(requests[0].prompt_ids, 12, stop_token_ids=frozenset({stop})), requests[1]]
    answers = write_blocks(towers, stopping)
    assert answers[0].token_ids == free[0].token_ids[: first + 1] and answers[0].finish_reason == "stop"
    assert answers[1].token_ids == free[1].token_ids and answers[1].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fields", "message"),
    [
        ((), 4, {}, "prompt is empty"),
        ((5,), 0, {}, "max_tokens must be at least 1"),
        ((5,), 4, {"sampling": SamplingParams(repetition_penalty=1.2)}, "penalties"),
        ((5,), 4, {"decode": DecodeConfig(policy="budgeted", threshold=0.5)}, "threshold 0.5 has no effect"),
        ((VOCAB,), 4, {}, "outside the vocabulary of 96"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    prompt: tuple[int, ...], max_tokens: int, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_blocks(shared_towers("llama"), [TowerRequest(prompt, max_tokens, **fields)])
