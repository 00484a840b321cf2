"""A policy that ends early: everything left opens at once when the model has made up its mind."""

from __future__ import annotations

import torch
from torch import Tensor

from model.decoding.policies.ranking import static
from model.decoding.policies.registry import RevealInputs, policy

GAPS = (7.5, 5.0, 2.5)  # in the first, second and last third of a block


@policy("prophet", needs=("gap",), steps=None)
def prophet(inputs: RevealInputs) -> Tensor:
    """All candidates when their mean top-2 logit gap reaches 7.5, 5.0 or 2.5, by the block's progress; else `static`.

    Source: Prophet ("Diffusion language models know the answer before decoding"). Progress there is steps taken over
    steps in all; here the decided share of the block, which is the same at one token a step and stays true after
    a sub-block has ended early.
    """
    gap = (inputs.features["gap"] * inputs.candidates).sum(1) / inputs.candidates.sum(1)
    early, middle, late = GAPS
    after_first = torch.where(inputs.progress < 2 / 3, middle, late)
    needed = torch.where(inputs.progress < 1 / 3, early, after_first)
    return torch.where((gap >= needed)[:, None], inputs.candidates, static(inputs))
