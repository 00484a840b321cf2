"""Reveal policies: which masked slots of the active sub-blocks open in this step. Pure functions of [R, K] tensors.

A policy sees all rows of a round that chose it and returns what to reveal. It must reveal at least one slot of every
row that has a candidate, and never a slot that is not a candidate; the tests hold every registered policy to that.
A new one is one function with `@policy("name")`. Sources: METHOD's table of reveal policies (Fast-dLLM v2: threshold;
SDAR, LLaDA: static).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RevealInputs:
    """R rows by K slots of their working blocks.

    candidates: bool [R, K], the masked slots of each row's active sub-block. confidence: float [R, K], the probability
    of the token chosen for a slot, meaningless where it is no candidate. threshold: float [R].
    steps_left: int64 [R], steps that the row's budget still grants this sub-block, this one included (at least 1).
    """

    confidence: Tensor
    candidates: Tensor
    threshold: Tensor
    steps_left: Tensor

    @property
    def ranked(self) -> Tensor:
        """Confidence with everything but candidates below all of them."""
        return self.confidence.masked_fill(~self.candidates, -1.0)


Policy = Callable[[RevealInputs], Tensor]
POLICIES: dict[str, Policy] = {}


def policy(name: str) -> Callable[[Policy], Policy]:
    """Register a reveal policy under the name that requests use."""

    def register(function: Policy) -> Policy:
        POLICIES[name] = function
        return function

    return register


def best(inputs: RevealInputs) -> Tensor:
    """The most confident candidate of each row (the leftmost of equals); bool [R, K]."""
    chosen = torch.zeros_like(inputs.candidates)
    return chosen.scatter_(1, inputs.ranked.argmax(1, keepdim=True), True) & inputs.candidates


@policy("threshold")
def threshold(inputs: RevealInputs) -> Tensor:
    """All candidates with confidence above the threshold, and the best one in any case; 1.0 opens one a step."""
    sure = inputs.candidates & (inputs.confidence > inputs.threshold[:, None])
    return sure | best(inputs)


@policy("sequential")
def sequential(inputs: RevealInputs) -> Tensor:
    """The leftmost candidate: with a sub-block of one this is the exactness oracle."""
    return inputs.candidates & (inputs.candidates.cumsum(1) == 1)


@policy("static")
def static(inputs: RevealInputs) -> Tensor:
    """The ceil(candidates / steps left) most confident ones: a fixed number of steps a block."""
    masked = inputs.candidates.sum(1)
    count = (masked + inputs.steps_left - 1) // inputs.steps_left
    order = inputs.ranked.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return inputs.candidates & (rank < count[:, None])


def steps_of_sub_block(steps: int, index: int, sub_blocks: int) -> int:
    """How many of a block's `steps` fall to sub-block `index` of `sub_blocks`: evenly shared, at least one."""
    return max(1, steps * (index + 1) // sub_blocks - steps * index // sub_blocks)
