"""The few words that the workers of a run exchange besides gradients: small integers over gloo, never over the device.

One worker needs no collective, so every call is free there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

HALF = 1 << 32


@dataclass(frozen=True)
class Ranks:
    """This worker among its kind: rank of `world`, local_rank on its node; group: a gloo process group.

    watch: makes the context that every exchange runs in, for a clock.
    """

    rank: int
    world: int
    local_rank: int
    group: dist.ProcessGroup | None
    watch: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def join(cls, rank: int, world: int, local_rank: int) -> Ranks:
        """Inside an initialised torch process group. Every rank must call it."""
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        return cls(rank, world, local_rank, group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: Sequence[int]) -> list[int]:
        """Element-wise sum over all ranks (each below 2**63)."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        with self.watch():
            dist.all_reduce(tensor, group=self.group)
        return [int(value) for value in tensor.tolist()]

    def total_float(self, value: float) -> float:
        """Sum over all ranks, in float64."""
        return self.total_floats([value])[0]

    def total_floats(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.watch():
            dist.all_reduce(tensor, group=self.group)
        return [float(value) for value in tensor.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.total([int(flag)])[0] > 0

    def barrier(self) -> None:
        """Every rank waits for every other."""
        self.total([0])


def halves(value: str) -> tuple[int, int]:
    """A 64-bit hash (hex) as two numbers whose sums over ranks do not overflow."""
    return divmod(int(value, 16), HALF)


def whole(high: int, low: int) -> str:
    """The hash again, modulo 2**64, from sums of halves."""
    return f"{(high * HALF + low) % HALF**2:016x}"
