"""The block cache: keys and values of committed tokens, written in place, never concatenated and never copied.

Token-major storage per layer, `[rows * length, kv_heads, head_dim]`: a row owns the stretch [row * length,
(row + 1) * length), its position p lives at row * length + p. A working block's keys and values are written right
behind the row's committed prefix; overwriting them in the next step is all that "not committed" means, so a step
costs one indexed copy of the block and no copy of the prefix. Reads are views. Layers are allocated when first
written, with the shapes that the model really has, and never cleared: on CPU only what is used becomes resident.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BlockCache:
    """`rows` slots of `length` tokens each. Slots are taken and given back; which are free is counted exactly."""

    def __init__(self, rows: int, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.length = length
        self.dtype = dtype
        self.device = device
        self._free = list(range(rows - 1, -1, -1))
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers allocated so far."""
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))

    def take(self) -> int:
        """A free row slot. Raises IndexError when none is left: ask `free` first."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        assert row not in self._free, f"row {row} was given back twice"
        self._free.append(row)

    def index(self, row: int, position: int) -> int:
        """Storage index of a row's position."""
        assert 0 <= position < self.length
        return row * self.length + position

    def write(self, layer: int, where: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, kv_heads, head_dim] at the storage indices `where` int64 [T]."""
        if layer not in self._keys:
            self._keys[layer] = self._allocate(key)
            self._values[layer] = self._allocate(value)
        self._keys[layer].index_copy_(0, where, key)
        self._values[layer].index_copy_(0, where, value)

    def view(self, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, end - begin, head_dim] of storage indices [begin, end), as views."""
        keys, values = self._keys[layer][begin:end], self._values[layer][begin:end]
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def _allocate(self, like: Tensor) -> Tensor:
        return torch.empty((self.rows * self.length, *like.shape[1:]), dtype=self.dtype, device=self.device)
