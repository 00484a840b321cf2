"""Decoding, token for token: against a decoder without cache, against transformers, alone and in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, PreTrainedConfig, Qwen2Config

import model.decoding.packing as packing
from actors.engine.events import Canvas, Event
from actors.engine.loop import Engine
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from model.decoding import Decoder, GenerationRequest, Phase, Row, Turn
from model.errors import UserError
from tests.decoding import (
    BLOCK,
    EDGES,
    MASK,
    SUB_BLOCK,
    answer,
    answers,
    make_request,
    naive_decode,
    prompt_of,
    renamed,
)
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_tokenizer


# ------------------------------------------------------------------------------------------------- the oracle
@pytest.fixture(scope="module")
def exact_backbone(sharp_backbone: Backbone) -> Backbone:
    return load_backbone(sharp_backbone.name, dtype=torch.float64)


@pytest.mark.parametrize("policy", ["threshold", "sequential"])
@pytest.mark.parametrize("length", EDGES)
def test_decoding_equals_the_decoder_without_a_cache(exact_backbone: Backbone, length: int, policy: str) -> None:
    for max_tokens in (1, 2, BLOCK, 2 * BLOCK + 3):
        request = make_request("r", prompt_of(length), max_tokens, policy=policy)
        result = answer(exact_backbone, request)
        expected, steps = naive_decode(exact_backbone, request)
        assert result.token_ids == expected
        assert result.steps_per_block == steps
        assert result.finish_reason == "length" and result.completion_tokens == max_tokens


def test_stops_end_a_block_early_and_equal_the_decoder_without_a_cache(exact_backbone: Backbone) -> None:
    whole = answer(exact_backbone, make_request("r", prompt_of(11), 24))
    for stop in sorted(set(whole.token_ids)):
        request = make_request("r", prompt_of(11), 24, stop=[stop])
        result = answer(exact_backbone, request)
        expected, steps = naive_decode(exact_backbone, request)
        assert result.token_ids == expected == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert result.steps_per_block == steps
        assert result.finish_reason == "stop"


def test_a_prompt_may_hold_the_mask_token_and_the_stop_token(exact_backbone: Backbone) -> None:
    stop = 20
    for length in (3, BLOCK, BLOCK + 3, 2 * BLOCK):
        prompt = list(prompt_of(length))
        prompt[0], prompt[length // 2], prompt[-1] = MASK, stop, MASK
        request = make_request("r", prompt, 13, stop=[stop])
        row, result = decoded(exact_backbone, request)
        assert result == naive_decode(exact_backbone, request)[0]
        assert row.tokens[:length].tolist() == prompt
        assert MASK not in result


def test_a_last_block_that_would_not_fit_the_context_is_cut_short(exact_backbone: Backbone) -> None:
    """Prompt and answer may fill a row whose length is no multiple of the block."""
    result = answer(exact_backbone, make_request("r", prompt_of(9), 12), max_length=21)
    assert result.completion_tokens == 12
    roomy = answer(exact_backbone, make_request("r", prompt_of(9), 12))
    assert result.token_ids[:7] == roomy.token_ids[:7], "blocks before the last are untouched"


# ------------------------------------------------------------------------------------------------- policies, options
def test_sub_blocks_of_one_decode_left_to_right_whatever_the_policy(sharp_backbone: Backbone) -> None:
    kinds: list[dict[str, Any]] = [{"policy": "sequential"}, {"policy": "threshold"}, {"policy": "static", "steps": 1}]
    requests = [make_request(str(i), prompt_of(10), 25, sub_block_size=1, **k) for i, k in enumerate(kinds)]
    assert len(set(answers(sharp_backbone, requests).values())) == 1


def test_threshold_one_opens_one_slot_a_step_as_static_with_a_step_a_token_does(sharp_backbone: Backbone) -> None:
    threshold = answer(sharp_backbone, make_request("r", prompt_of(10), 30, threshold=1.0))
    static = answer(sharp_backbone, make_request("r", prompt_of(10), 30, policy="static", steps=BLOCK))
    assert threshold.token_ids == static.token_ids
    assert threshold.steps_per_block == static.steps_per_block == [6, 7, 7, 7]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8])
def test_static_keeps_to_its_steps_a_block(sharp_backbone: Backbone, steps: int) -> None:
    result = answer(sharp_backbone, make_request("r", prompt_of(16), 32, policy="static", steps=steps))
    assert max(result.steps_per_block) <= max(steps, BLOCK // SUB_BLOCK)


def test_the_first_token_of_a_block_costs_no_step(sharp_backbone: Backbone) -> None:
    result = answer(sharp_backbone, make_request("r", prompt_of(2 * BLOCK), 2 * BLOCK + 1, threshold=1.0))
    assert result.steps_per_block == [BLOCK - 1, BLOCK - 1]
    assert result.forwards == {"prefill": 1, "denoise": 2 * (BLOCK - 1), "commit": 2}


def queries_of(backbone: Backbone, **kind: Any) -> list[tuple[int, int]]:
    """(place in the block, tokens) of each denoising forward of one block."""
    decoder = Decoder(backbone, rows=1)
    row = decoder.make_row(make_request("r", prompt_of(BLOCK), BLOCK, threshold=1.0, **kind))
    decoder.step([Turn(row, row.prefill_left)])
    queries = []
    while row.phase is Phase.DENOISE:
        turn = Turn(row)
        decoder.supply(turn)
        (piece,) = packing.pack([turn], decoder.cache).plan.pieces
        assert piece.visible == 2 * BLOCK, "the whole working block is seen"
        queries.append((turn.query.start - BLOCK, len(turn.query)))
        decoder.step([turn])
    return queries


def test_the_sub_block_cache_runs_fewer_tokens_and_refreshes_for_a_sub_block_s_first_slot(
    sharp_backbone: Backbone,
) -> None:
    whole, first, second = (0, BLOCK), (0, 4), (4, 4)
    assert queries_of(sharp_backbone) == [whole] * 7
    assert queries_of(sharp_backbone, refresh="sub_block") == [whole, first, first, whole, second, second, second]
    assert queries_of(sharp_backbone, refresh="every:2") == [whole, first, whole, whole, second, whole, second]
    assert queries_of(sharp_backbone, refresh="every:1") == [whole] * 7


# ------------------------------------------------------------------------------------------------- sampling
def test_a_seed_gives_the_same_answer_and_another_seed_another(sharp_backbone: Backbone) -> None:
    for kind in ({}, {"mode": "ar"}):
        a, b, c = (
            answer(sharp_backbone, make_request("r", prompt_of(8), 24, temperature=1.0, seed=seed, **kind)).token_ids
            for seed in (1, 1, 2)
        )
        assert a == b != c


def test_the_first_token_of_a_block_is_sampled_like_any_other(sharp_backbone: Backbone) -> None:
    first = {
        answer(sharp_backbone, make_request("r", prompt_of(BLOCK), 1, temperature=2.0, seed=seed)).token_ids
        for seed in range(12)
    }
    assert len(first) > 1


def test_top_k_of_one_is_greedy(sharp_backbone: Backbone) -> None:
    greedy = answer(sharp_backbone, make_request("r", prompt_of(8), 20))
    cut = answer(sharp_backbone, make_request("r", prompt_of(8), 20, temperature=1.5, top_k=1, seed=9))
    assert cut.token_ids == greedy.token_ids


# ------------------------------------------------------------------------------------------------- AR mode
def other_config(kind: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    llama = tiny_config(initializer_range=0.5)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id")
    return kind(**{n: getattr(llama, n) for n in (*names, *more)}, **fields)


ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": tiny_config(initializer_range=0.5),
    "qwen2": other_config(Qwen2Config, tie_word_embeddings=False),
    "mistral": other_config(MistralConfig, sliding_window=12, head_dim=16),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def saved(folder: Path, config: PreTrainedConfig) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def generated(folder: Path, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """What transformers' `generate` writes, greedily, without stopping."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **options)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_ar_mode_equals_generate_of_transformers(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / name, ARCHITECTURES[name])
    backbone = load_backbone(folder)
    prompts = [prompt_of(n) for n in (1, 3, 8, 21, 50)]
    requests = [make_request(str(i), p, 40, mode="ar") for i, p in enumerate(prompts)]
    expected = {str(i): generated(folder, p, 40) for i, p in enumerate(prompts)}
    assert answers(backbone, requests) == expected
    assert answers(backbone, requests, prefill_tokens=7, max_rows=2) == expected


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_other_architectures_write_blocks_as_without_a_cache(tmp_path: Path, name: str) -> None:
    """GPT-2 has learned positions and its own linear layers; Mistral's window stays open, as the oracle knows none."""
    config = ARCHITECTURES[name]
    if name == "mistral":
        config = other_config(MistralConfig, sliding_window=None, head_dim=16)
    config.block_diffusion = {"block_size": BLOCK, "mask_token_id": MASK, "sub_block_size": SUB_BLOCK}
    backbone = load_backbone(saved(tmp_path / name, config), dtype=torch.float64)
    for length in (5, BLOCK, 2 * BLOCK + 2):
        request = make_request("r", prompt_of(length), 20)
        assert answer(backbone, request).token_ids == naive_decode(backbone, request)[0]


def test_an_adapted_model_in_ar_mode_equals_generate_of_transformers(sharp_backbone: Backbone) -> None:
    prompt = prompt_of(19)
    result = answer(sharp_backbone, make_request("r", prompt, 30, mode="ar"))
    assert result.token_ids == generated(Path(sharp_backbone.name), prompt, 30)
    assert result.forwards == {"prefill": 1, "denoise": 0, "commit": 29}
    assert result.steps_per_block == []


def test_an_empty_prompt_starts_from_bos_or_is_refused(sharp_backbone: Backbone) -> None:
    bos = sharp_backbone.tokenizer.bos_token_id
    for kind in ({}, {"mode": "ar"}):
        empty = answer(sharp_backbone, make_request("r", (), 12, **kind))
        assert empty == answer(sharp_backbone, make_request("r", (bos,), 12, **kind))
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(UserError, match="no token to start from"):
        answer(replace(sharp_backbone, tokenizer=tokenizer), make_request("r", (), 5))


# ------------------------------------------------------------------------------------------------- the cache
def decoded(
    backbone: Backbone, request: GenerationRequest, decoder: Decoder | None = None
) -> tuple[Row, tuple[int, ...]]:
    """The finished row, still holding its slot."""
    decoder = decoder or Decoder(backbone, rows=1)
    row = decoder.make_row(request)
    while row.phase is not Phase.DONE:
        decoder.step([Turn(row, row.prefill_left)])
    return row, row.result().token_ids


def cached(decoder: Decoder, layer: int, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the row's committed positions."""
    where = decoder.cache.where(np.array(row.pages), np.arange(row.committed))
    return decoder.cache.read(layer, torch.from_numpy(where))


@pytest.mark.parametrize("kind", [{}, {"refresh": "sub_block"}, {"policy": "static", "steps": 2}, {"mode": "ar"}])
def test_keys_and_values_after_commits_are_those_of_a_clean_prefill(
    exact_backbone: Backbone, kind: dict[str, Any]
) -> None:
    written, clean = Decoder(exact_backbone, rows=1), Decoder(exact_backbone, rows=1)
    row, _ = decoded(exact_backbone, make_request("r", prompt_of(13), 40, **kind), written)
    again = clean.make_row(make_request("r", row.tokens[: row.committed].tolist(), 1, **kind))
    assert again.prefill_left == row.committed > 13 + BLOCK
    clean.step([Turn(again, again.prefill_left)])
    for layer in range(exact_backbone.layers):
        for ours, theirs in zip(cached(written, layer, row), cached(clean, layer, again), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9)


# ------------------------------------------------------------------------------------------------- what cannot run
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("r", prompt_of(600), 1), "leave no room for an answer in 512"),
        (
            make_request("r", prompt_of(500), 13),
            "max_tokens 13 and a prompt of 500 tokens exceed 512: ask for at most 12",
        ),
        (make_request("r", (11, 9999), 5), "token id 9999, outside the vocabulary of 267"),
        (make_request("r", (11, -1), 5), "token id -1, outside"),
        (make_request("r", (11,), 5, policy="treshold"), "did you mean 'threshold'"),
        (make_request("r", (11,), 5, sub_block_size=3), "sub_block_size 3 does not divide block_size 8"),
    ],
)
def test_what_cannot_run_is_refused_with_a_sentence(
    sharp_backbone: Backbone, request_: GenerationRequest, message: str
) -> None:
    engine = Engine(sharp_backbone)
    with pytest.raises(UserError, match=message):
        engine.submit(request_, lambda event: None)
    assert not engine.step()


def test_blocks_of_a_model_that_is_not_adapted_are_refused(tiny_model: Path) -> None:
    backbone = load_backbone(tiny_model)
    with pytest.raises(UserError, match="needs a model adapted to write blocks"):
        answer(backbone, make_request("r", (11,), 5))
    assert answer(backbone, make_request("r", (11,), 5, mode="ar")).completion_tokens == 5


OUT_OF_BOUNDS: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": -1},
    {"seed": 2**63},
    {"stop_strings": ("",)},
    {"threshold": 0.0},
    {"steps": 0},
    {"mode": "fastest"},
    {"fused": "always"},
    {"refresh": "every:0"},
    {"refresh": "every:٣"},
    {"refresh": "never"},
]


@pytest.mark.parametrize("fields", OUT_OF_BOUNDS)
def test_a_request_out_of_bounds_names_the_field(fields: dict[str, Any]) -> None:
    name = next(iter(fields)).removesuffix("_strings")
    with pytest.raises(UserError, match=name):
        make_request("r", (11,), 5, **fields)


def test_budgets_of_one_token_and_less(sharp_backbone: Backbone) -> None:
    with pytest.raises(UserError, match="max_tokens must be at least 1"):
        make_request("r", (11,), 0)
    for length in EDGES:
        result = answer(sharp_backbone, make_request("r", prompt_of(length), 1))
        assert result.completion_tokens == 1 and result.finish_reason == "length"


@pytest.mark.parametrize("huge", [2**63, 2 * (2**63 - 1), 10**30, 10**400])
@pytest.mark.parametrize("policy", ["static", "dimple", "prophet", "budgeted"])
def test_more_steps_than_slots_are_one_a_token_however_many(sharp_backbone: Backbone, policy: str, huge: int) -> None:
    one_a_token = make_request("r", prompt_of(5), 20, policy=policy, steps=BLOCK)
    result = answer(sharp_backbone, replace(one_a_token, decode=replace(one_a_token.decode, steps=huge)))
    expected = answer(sharp_backbone, one_a_token)
    assert (result.token_ids, result.steps_per_block) == (expected.token_ids, expected.steps_per_block)


@pytest.mark.parametrize("huge", [2**63 - 1, 2**63, 10**400])
def test_a_top_k_beyond_the_vocabulary_cuts_nothing_however_large(sharp_backbone: Backbone, huge: int) -> None:
    request = make_request("r", prompt_of(5), 20, temperature=1.0, seed=3, top_k=1000)
    raised = replace(request, sampling=replace(request.sampling, top_k=huge))
    assert answer(sharp_backbone, raised).token_ids == answer(sharp_backbone, request).token_ids


def test_a_vocabulary_of_stops_gives_one_token_and_no_text(sharp_backbone: Backbone) -> None:
    for kind in ({}, {"mode": "ar"}):
        result = answer(sharp_backbone, make_request("r", prompt_of(9), 20, stop=range(VOCAB_SIZE), **kind))
        assert (result.completion_tokens, result.text, result.finish_reason) == (1, "", "stop")


@pytest.mark.parametrize("prompt", [10, 2 * BLOCK])
@pytest.mark.parametrize("kind", [{}, {"fused": "speculative"}, {"fused": "masked_head"}, {"mode": "ar"}])
def test_traced_reveals_are_the_answer(sharp_backbone: Backbone, kind: dict[str, Any], prompt: int) -> None:
    """Every position is in one canvas, whichever forward decided it, and in the block that the canvas names."""
    seen: dict[int, int] = {}
    block = 1 if kind.get("mode") == "ar" else BLOCK

    def listen(event: Event) -> None:
        if isinstance(event, Canvas):
            assert event.reveals and (event.block_size, event.prompt_tokens) == (block, prompt)
            for reveal in event.reveals:
                assert reveal.position not in seen
                assert event.block_start <= reveal.position < event.block_start + block
                seen[reveal.position] = reveal.token

    engine = Engine(sharp_backbone)
    request = make_request("r", prompt_of(prompt), 30, trace=True, **kind)
    engine.submit(request, listen)
    engine.run_until_idle()
    token_ids = answer(sharp_backbone, renamed(request, "again")).token_ids
    assert tuple(seen[position] for position in range(prompt, prompt + len(token_ids))) == token_ids
    assert generate_all(engine, [renamed(request, "once more")])[0].token_ids == token_ids
