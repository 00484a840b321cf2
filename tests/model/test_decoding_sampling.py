"""Sampling: draws that follow the distribution, keyed by (seed, position, step), and confidences that do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model.decoding import sampling
from model.decoding.sampling import Chosen, Draws, Edits, SlotSampling, choose, uniform

NONE = torch.zeros(0, dtype=torch.int64)


def draws(
    slots: list[int],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seeds: Tensor,
) -> Draws:
    n = len(slots)
    return Draws(
        slot=torch.tensor(slots),
        temperature=torch.full((n,), temperature, dtype=torch.float64),
        top_p=torch.full((n,), top_p, dtype=torch.float64),
        top_k=torch.full((n,), top_k),
        min_p=torch.full((n,), min_p, dtype=torch.float64),
        seed=seeds,
        position=torch.zeros(n, dtype=torch.int64),
        step=torch.zeros(n, dtype=torch.int64),
    )


def frequencies(logits: Tensor, n: int = 4000, **how: float) -> Tensor:
    """Relative frequency of each token over n seeds."""
    batch = draws(list(range(n)), seeds=torch.arange(n) * 7919, **how)  # type: ignore[arg-type]
    kind = "cut" if set(how) - {"temperature"} else "plain"
    chosen = choose(logits.expand(n, -1).clone(), SlotSampling(NONE, None, **{kind: batch}))
    return torch.bincount(chosen.token, minlength=len(logits)) / n


LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.5, -4.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert torch.allclose(frequencies(LOGITS, temperature=temperature), expected, atol=0.03)


def test_top_k_draws_among_the_k_most_likely() -> None:
    expected = LOGITS.softmax(-1).where(LOGITS >= 2.5, 0.0)
    assert torch.allclose(frequencies(LOGITS, top_k=2), expected / expected.sum(), atol=0.03)


def test_top_p_draws_among_the_fewest_tokens_that_reach_it() -> None:
    probability = LOGITS.softmax(-1)
    top_p = float(probability[1] + probability[4]) - 0.01  # the two most likely are just needed
    expected = probability.where(LOGITS >= 2.5, 0.0)
    assert torch.allclose(frequencies(LOGITS, top_p=top_p), expected / expected.sum(), atol=0.03)
    assert frequencies(LOGITS, top_p=1e-9)[1] == 1.0


def test_uniform_numbers_are_even_and_differ_in_seed_position_and_step() -> None:
    grid = torch.cartesian_prod(*[torch.arange(20)] * 3) - 3
    numbers = uniform(grid[:, 0], grid[:, 1], grid[:, 2])
    assert len(numbers.unique()) == len(numbers)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = torch.histc(numbers.float(), bins=10, min=0, max=1)
    assert (counts / len(numbers) - 0.1).abs().max() < 0.01


def test_a_draw_does_not_depend_on_the_slots_beside_it() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(6)
    for kind, how in (("plain", {}), ("cut", {"top_k": 7}), ("cut", {"top_p": 0.8}), ("cut", {"min_p": 0.2})):
        together = draws(list(range(6)), seeds=seeds, **how)  # type: ignore[arg-type]
        whole = choose(logits.clone(), SlotSampling(NONE, None, **{kind: together}))
        for i in range(6):
            alone = draws([0], seeds=seeds[i : i + 1], **how)  # type: ignore[arg-type]
            one = choose(logits[i : i + 1].clone(), SlotSampling(NONE, None, **{kind: alone}))
            assert int(one.token) == int(whole.token[i])
            assert float(one.confidence) == float(whole.confidence[i])


def test_confidence_is_untempered_and_without_the_banned_token() -> None:
    logits = torch.tensor([[5.0, 2.0, 1.0, 0.0], [5.0, 2.0, 1.0, 0.0]])
    how = SlotSampling(torch.tensor([0]), 0, plain=draws([1], temperature=0.3, seeds=torch.tensor([1])))
    chosen = choose(logits.clone(), how)
    assert chosen.token.tolist() == [1, 0]
    assert float(chosen.confidence[0]) == pytest.approx(float(logits[0, 1:].softmax(-1)[0]))
    assert float(chosen.confidence[1]) == pytest.approx(float(logits[1].softmax(-1)[0]))


def test_confidence_is_float32_of_half_precision_logits_and_nan_of_bad_ones() -> None:
    greedy = SlotSampling(NONE, None)
    assert choose(torch.randn(2, 8).bfloat16(), greedy).confidence.dtype == torch.float32
    bad = torch.zeros(3, 8)
    bad[0, 2], bad[1, 3] = torch.nan, torch.inf
    assert choose(bad, greedy).confidence.isnan().tolist() == [True, True, False]


# ------------------------------------------------------------------------------------------------- cuts
def test_min_p_draws_among_tokens_at_least_so_likely_beside_the_best() -> None:
    """At temperature 2 the logits 3, 2.5, 2, 1 and 0 are 1, 0.78, 0.61, 0.37 and 0.22 times as likely as the best."""
    expected = (LOGITS / 2).softmax(-1).where(LOGITS >= 2.0, 0.0)
    got = frequencies(LOGITS, temperature=2.0, min_p=0.5)
    assert torch.allclose(got, expected / expected.sum(), atol=0.03)
    assert frequencies(LOGITS, min_p=1.0)[1] == 1.0


@given(
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_cuts_leave_the_tokens_that_transformers_leaves(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = LogitsProcessorList(warpers)(NONE[None], logits.clone()).softmax(-1)
    how = draws([0], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=torch.tensor([0]))
    weight, order = sampling._cut(logits, how)
    ours = torch.zeros_like(weight).scatter_(1, order, weight / weight.sum())
    assert torch.allclose(ours, expected, atol=1e-12)


# ------------------------------------------------------------------------------------------------- edits
def edited(logits: Tensor, *edits: tuple[int, int, float, float], banned: int | None = None) -> Chosen:
    """Greedy choice after edits (slot, token, repetition, shift)."""
    slot, token, repetition, shift = zip(*edits, strict=True)
    numbers = (torch.tensor(column, dtype=torch.float64) for column in (repetition, shift))
    made = Edits(torch.tensor(slot), torch.tensor(token), *numbers)
    every = torch.arange(len(logits))
    return choose(logits.clone(), SlotSampling(every if banned is not None else NONE, banned, edits=made))


def test_edits_divide_what_is_likely_multiply_what_is_not_and_shift_both() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, 0.0], [2.0, -1.0, 1.5, 0.0]])
    chosen = edited(logits, (0, 0, 2.0, 0.0), (0, 1, 2.0, 0.0), (0, 3, 2.0, 0.25), (1, 1, 1.0, 100.0))
    assert chosen.logits[0].tolist() == [1.0, -2.0, 1.5, 0.25]
    assert chosen.logits[1].tolist() == [2.0, 99.0, 1.5, 0.0]
    assert chosen.token.tolist() == [2, 1]
    assert chosen.confidence.tolist() == pytest.approx([float(chosen.logits[0].softmax(-1)[2]), 1.0])


def test_a_biased_out_token_counts_in_no_confidence_and_no_bias_brings_the_mask_token_back() -> None:
    logits = torch.tensor([[5.0, 2.0, 1.0, 0.0]])
    chosen = edited(logits, (0, 0, 1.0, -100.0), (0, 3, 1.0, 100.0), banned=3)
    assert int(chosen.token) == 1
    assert float(chosen.confidence) == pytest.approx(float(logits[0, 1:3].softmax(-1)[0]))
    assert int(chosen.top_logprobs(torch.tensor([0]), 4)[0][0, 0]) == 1


def test_repetition_equals_the_processor_of_transformers() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    text = torch.tensor([[4, 9, 9, 20]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(text, logits.clone())
    assert torch.equal(edited(logits, *((0, t, 1.7, 0.0) for t in (4, 9, 20))).logits, expected)


# ------------------------------------------------------------------------------------------------- what else is told
def test_entropy_gap_and_logprobs_are_those_of_the_deciding_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0], [1.0, 4.0, 9.0, 2.5, 0.0]])
    how = SlotSampling(torch.tensor([0, 1]), 2, plain=draws([1], temperature=0.01, seeds=torch.tensor([1])))
    chosen, both = choose(logits.clone(), how), torch.tensor([0, 1])
    assert float(chosen.entropy(both)[0]) == pytest.approx(math.log(4))
    spread = logits[1, [0, 1, 3, 4]].softmax(-1)
    assert float(chosen.entropy(both)[1]) == pytest.approx(-float((spread * spread.log()).sum()))
    assert chosen.gap(both).tolist() == pytest.approx([0.0, 1.5])
    expected = logits[1, [0, 1, 3, 4]].log_softmax(-1)
    assert float(chosen.logprob[1]) == pytest.approx(float(expected[1]))
    tokens, values = chosen.top_logprobs(torch.tensor([1]), 3)
    assert tokens.tolist() == [[1, 3, 0]]
    assert values[0].tolist() == pytest.approx(expected[[1, 2, 0]].tolist())
