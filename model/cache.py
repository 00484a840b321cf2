"""The paged block cache: keys and values in pages of one block, written in place, never concatenated, never copied.

Token-major storage per layer, `[pages * page_size, kv_heads, head_dim]`. A row has a page table: its position p lives
at storage index `table[p // page_size] * page_size + p % page_size`. A working block's keys and values are written into
the row's next page; overwriting them in the next step is all that "not committed" means, so a step costs one indexed
write of the block. Which page is whose is the `PagePool`'s business. Layers are allocated when first written, with the
shapes that the model really has, and never cleared: on CPU only what is used becomes resident. One page more than the
pool knows takes the writes of padding, where shapes are static.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.pages import PagePool


class BlockCache:
    """Storage of `pages` pages of `page_size` tokens, and the pool that hands them out."""

    def __init__(
        self, pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device, prefix_cache: bool = True
    ) -> None:
        self.pool = PagePool(pages, prefix_cache=prefix_cache)
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.finite = False
        self.keys: list[Tensor] = []  # one a layer
        self.values: list[Tensor] = []

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.pool.total * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all layers allocated so far."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    @property
    def scratch(self) -> int:
        """Storage index that nobody reads."""
        return self.tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold positions [0, tokens)."""
        return -(-tokens // self.page_size)

    def where(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Storage indices int64 of `positions` in a row with the page table `table` int64 [pages]."""
        return np.asarray(table[positions // self.page_size] * self.page_size + positions % self.page_size)

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Storage of a layer, shaped for tokens like key and value [T, kv_heads, head_dim] when it is new."""
        if layer == len(self.keys):
            self.add_layer(key.shape[1], key.shape[2], value.shape[2])
        return self.keys[layer], self.values[layer]

    def add_layer(self, heads: int, key_width: int, value_width: int) -> None:
        """Storage for one more layer."""
        self.keys.append(self._allocate(heads, key_width))
        self.values.append(self._allocate(heads, value_width))

    def write(self, layer: int, where: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, kv_heads, head_dim] at the storage indices `where` int64 [T]."""
        keys, values = self.layer(layer, key, value)
        keys.index_copy_(0, where, key)
        values.index_copy_(0, where, value)

    def read(self, layer: int, where: Tensor) -> tuple[Tensor, Tensor]:
        """Copies [1, kv_heads, n, head_dim] of the storage indices `where` int64 [n]."""
        keys, values = self.keys[layer][where], self.values[layer][where]
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def keep_finite(self) -> None:
        """Zero the storage, now and when more is allocated: for attention that multiplies what it masks by zero."""
        self.finite = True
        with torch.inference_mode():
            for tensor in (*self.keys, *self.values):
                tensor.zero_()

    def forget(self, pages: Sequence[int]) -> None:
        """Zero pages that may hold what is not finite, where that matters."""
        if self.finite and pages:
            where = torch.from_numpy(self.where(np.array(pages), np.arange(len(pages) * self.page_size)))
            with torch.inference_mode():
                for tensor in (*self.keys, *self.values):
                    tensor.index_fill_(0, where.to(self.device), 0)

    def _allocate(self, heads: int, width: int) -> Tensor:
        make = torch.zeros if self.finite else torch.empty
        return make((self.tokens + self.page_size, heads, width), dtype=self.dtype, device=self.device)
