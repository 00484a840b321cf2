"""The acceptance rule of speculative decoding: which drafted tokens stand, and what takes the place of the others.

A drafted token x was drawn from q, the verifier would draw from p. It stands with probability min(1, p(x) / q(x)); else
a draw from max(0, p - q) takes its place. Either way the token is distributed as p, whatever q is (Leviathan et al.,
arXiv 2211.17192, theorem 3.5). Greedy decoding needs none of this: there a token stands if it is the most likely one.

The noise is a hash of (seed, position, step), like that of every draw: ACCEPT, REPLACE and DRAFT are steps that no
denoising step has, so the three draws about a position are independent of each other and of AR mode's own (step 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.decoding.sampling import invert

ACCEPT, REPLACE, DRAFT = -1, -2, -3


def accept(p: Tensor, q: Tensor, token: Tensor, chance: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """(whether each drafted token stands, bool [M]; what stands there in the end, int64 [M]). Slots are independent.

    p, q: [M, V], each line a distribution; token: int64 [M], drawn from q; chance, point: uniform [M] in [0, 1), noise
    of the acceptance and of the replacement.
    """
    line = torch.arange(len(token), device=token.device)
    stands = chance * q[line, token] < p[line, token]
    residual = (p - q).clamp_(min=0.0).double()
    lost = residual.sum(-1, keepdim=True) <= 0.0  # p and q are equal but for rounding
    return stands, torch.where(stands, token, invert(torch.where(lost, p.double(), residual), point))
