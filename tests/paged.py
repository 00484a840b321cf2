"""Rows with page tables of their own, for the tests of the C++ kernels."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

from model.kernels.build import COMPILERS
from model.kernels.paged_attention import available

PAGE = 4
# Where there is a compiler the kernels must compile: then a failure is a failure, not a skip.
needs_kernels = pytest.mark.skipif(
    not available() and not any(map(shutil.which, COMPILERS)), reason="no C++ compiler is installed here"
)


class Pages:
    """Rows with shuffled page tables over one storage."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        counts = [math.ceil(length / PAGE) for length in lengths]
        generator = torch.Generator().manual_seed(seed)
        self.slots = (sum(counts) + 3) * PAGE
        self.table = torch.randperm(self.slots // PAGE, generator=generator)[: sum(counts)].contiguous()
        self.begin = [sum(counts[:i]) for i in range(len(counts))]

    def where(self, row: int, start: int, end: int) -> Tensor:
        position = torch.arange(start, end)
        return self.table[self.begin[row] + position // PAGE] * PAGE + position % PAGE
