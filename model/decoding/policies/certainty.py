"""Policies that ask how many slots may open together: the more there are, the surer each must be.

Each ranks the candidates, the surest first, and opens the longest beginning that its bound allows. What is bounded
never falls as a slot is added, so the longest beginning ends where the bound first fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.decoding.policies.registry import RevealInputs, first, policy


@policy("factor", factor=1.0)
def factor(inputs: RevealInputs) -> Tensor:
    """The largest n with (n + 1) (1 - c_(n)) < factor, c_(n) the n-th highest confidence; at least one.

    Source: Fast-dLLM, arXiv 2505.22618, the factor rule (factor 1).
    """
    confidence = inputs.ranked.sort(dim=1, descending=True).values
    n = torch.arange(1, confidence.shape[1] + 1, device=confidence.device)
    return _opened(inputs, inputs.confidence, (n + 1) * (1.0 - confidence) < inputs.column("factor"))


@policy("frechet", budget=0.5)
def frechet(inputs: RevealInputs) -> Tensor:
    """The largest n whose sum of (1 - c) stays under the budget, most confident first; at least one.

    By Frechet's bound these tokens are then right together with a probability above 1 - budget, however they depend on
    one another; at 0.5 no other combination can be more likely. Source: Fast-dLLM++, arXiv 2606.02955.
    """
    doubt = (1.0 - inputs.ranked.sort(dim=1, descending=True).values).cumsum(1)
    return _opened(inputs, inputs.confidence, doubt < inputs.column("budget"))


@policy("entropy", needs=("entropy",), gamma=0.1)
def entropy(inputs: RevealInputs) -> Tensor:
    """The largest n with sum H - max H <= gamma (nats), lowest entropy H first; at least one.

    Source: EB-Sampler, arXiv 2505.24857.
    """
    certain = -inputs.features["entropy"]
    ranked = inputs.features["entropy"].masked_fill(~inputs.candidates, torch.inf).sort(dim=1).values
    before = torch.nn.functional.pad(ranked[:, :-1].cumsum(1), (1, 0))  # the sum without the last, which is the largest
    return _opened(inputs, certain, before <= inputs.column("gamma"))


def _opened(inputs: RevealInputs, score: Tensor, allowed: Tensor) -> Tensor:
    """The candidates of highest score, as many as the beginning of `allowed` (bool [R, K], by rank) is long."""
    return first(score, inputs.candidates, allowed.sum(1).clamp(min=1))
