"""Policies that open the most confident slots: those above a bound, or as many as a schedule of steps wants."""

from __future__ import annotations

import torch
from torch import Tensor

from model.decoding.policies.registry import RevealInputs, first, policy, scheduled


@policy("threshold", threshold=0.9)
def threshold(inputs: RevealInputs) -> Tensor:
    """All candidates with confidence above the threshold, and the best one in any case; 1.0 opens one a step.

    Source: Fast-dLLM v2 (threshold 0.9).
    """
    sure = inputs.candidates & (inputs.confidence > inputs.column("threshold"))
    return sure | first(inputs.confidence, inputs.candidates, torch.ones_like(inputs.steps_left))


@policy("sequential")
def sequential(inputs: RevealInputs) -> Tensor:
    """The leftmost candidate: with a sub-block of one this is the exactness oracle."""
    return inputs.candidates & (inputs.candidates.cumsum(1) == 1)


@policy("static", steps=None)
def static(inputs: RevealInputs) -> Tensor:
    """The ceil(candidates / steps left) most confident ones: a fixed number of steps a block. Source: SDAR, LLaDA."""
    return first(inputs.confidence, inputs.candidates, scheduled(inputs))


@policy("dimple", gamma=0.95, steps=None, at_most={"gamma": 1.0})
def dimple(inputs: RevealInputs) -> Tensor:
    """All candidates with confidence above gamma; where there is none, as many as `static` opens.

    Source: Dimple, arXiv 2505.16990, confident decoding.
    """
    sure = inputs.candidates & (inputs.confidence > inputs.column("gamma"))
    return torch.where(sure.any(1, keepdim=True), sure, static(inputs))


@policy("budgeted", gamma=0.8, steps=None, at_most={"gamma": 1.0})
def budgeted(inputs: RevealInputs) -> Tensor:
    """The max(#(confidence > gamma), ceil(candidates / steps left)) most confident: never slower than `static`.

    Source: TwoTower (gamma 0.8).
    """
    sure = (inputs.candidates & (inputs.confidence > inputs.column("gamma"))).sum(1)
    return first(inputs.confidence, inputs.candidates, torch.maximum(sure, scheduled(inputs)))
