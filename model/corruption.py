"""Complementary corruption of Fast-dLLM v2 (METHOD: per-block noise level, two views that mask opposite tokens).

Every draw comes from a generator that is passed in. `row_generator` keys it by (seed, sample id, epoch), so the masks
of a sample never depend on the batch, the worker or the number of workers it lands on.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

IGNORED = -100  # label of a position without loss
MIN_MASK_PROBABILITY = 1e-3


def row_generator(seed: int, sample_id: int, epoch: int) -> torch.Generator:
    """A CPU generator that depends on these three numbers and nothing else."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}/{epoch}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_noise(length: int, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One row's noise: (t float32 [L / K] uniform in [0, 1), mask bool [L] drawn with p = (1 - 1e-3) t + 1e-3)."""
    t = torch.rand(length // block_size, generator=generator)
    probability = (1 - MIN_MASK_PROBABILITY) * t + MIN_MASK_PROBABILITY
    return t, torch.rand(length, generator=generator) < probability.repeat_interleave(block_size)


def complementary_views(input_ids: Tensor, labels: Tensor, mask: Tensor, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Two corrupted copies of `input_ids` [..., L]: view 1 masks supervised tokens under `mask`, view 2 the others."""
    supervised = labels != IGNORED
    return (
        input_ids.masked_fill(supervised & mask, mask_token_id),
        input_ids.masked_fill(supervised & ~mask, mask_token_id),
    )
