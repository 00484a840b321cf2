"""Sampling: draws that follow the distribution, keyed by (seed, position, step), and confidences that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.decoding.sampling import Draws, SlotSampling, choose, uniform


def draws(slots: list[int], *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seeds: Tensor) -> Draws:
    n = len(slots)
    return Draws(
        slot=torch.tensor(slots),
        temperature=torch.full((n,), temperature, dtype=torch.float64),
        top_p=torch.full((n,), top_p, dtype=torch.float64),
        top_k=torch.full((n,), top_k),
        seed=seeds,
        position=torch.zeros(n, dtype=torch.int64),
        step=torch.zeros(n, dtype=torch.int64),
    )


def frequencies(logits: Tensor, n: int = 4000, **how: float) -> Tensor:
    """Relative frequency of each token over n seeds."""
    batch = draws(list(range(n)), seeds=torch.arange(n) * 7919, **how)  # type: ignore[arg-type]
    kind = "cut" if how.get("top_k") or how.get("top_p", 1.0) < 1.0 else "plain"
    token, _ = choose(
        logits.expand(n, -1).clone(), SlotSampling(torch.zeros(0, dtype=torch.int64), None, **{kind: batch})
    )
    return torch.bincount(token, minlength=len(logits)) / n


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
    for kind, how in (("plain", {}), ("cut", {"top_k": 7}), ("cut", {"top_p": 0.8})):
        together = draws(list(range(6)), seeds=seeds, **how)  # type: ignore[arg-type]
        token, confidence = choose(
            logits.clone(), SlotSampling(torch.zeros(0, dtype=torch.int64), None, **{kind: together})
        )
        for i in range(6):
            alone = draws([0], seeds=seeds[i : i + 1], **how)  # type: ignore[arg-type]
            one = SlotSampling(torch.zeros(0, dtype=torch.int64), None, **{kind: alone})
            got, sure = choose(logits[i : i + 1].clone(), one)
            assert (int(got), float(sure)) == (int(token[i]), float(confidence[i]))


def test_confidence_is_untempered_and_without_the_banned_token() -> None:
    logits = torch.tensor([[5.0, 2.0, 1.0, 0.0], [5.0, 2.0, 1.0, 0.0]])
    how = SlotSampling(torch.tensor([0]), 0, plain=draws([1], temperature=0.3, seeds=torch.tensor([1])))
    token, confidence = choose(logits.clone(), how)
    assert token.tolist() == [1, 0]
    assert float(confidence[0]) == pytest.approx(float(logits[0, 1:].softmax(-1)[0]))
    assert float(confidence[1]) == pytest.approx(float(logits[1].softmax(-1)[0]))


def test_confidence_is_float32_of_half_precision_logits_and_nan_of_bad_ones() -> None:
    greedy = SlotSampling(torch.zeros(0, dtype=torch.int64), None)
    _, confidence = choose(torch.randn(2, 8).bfloat16(), greedy)
    assert confidence.dtype == torch.float32
    bad = torch.zeros(3, 8)
    bad[0, 2], bad[1, 3] = torch.nan, torch.inf
    _, confidence = choose(bad, greedy)
    assert confidence.isnan().tolist() == [True, True, False]
