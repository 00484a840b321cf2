"""Attention of packed query tokens over a paged key-value cache, on CPU.

Storage of a layer is [S, Hkv, D], token-major; position p of a row lies at slot pages[p // page_size] * page_size +
p % page_size. A call is a list of pieces, int64 [P, 6] = (offset, count, position, visible, span, page_begin): `count`
queries from packed index `offset` on, at row positions from `position` on, their row's page table starting at
page_table[page_begin]. The query at position q sees the keys k < min(visible, (q // span + 1) * span), and with a
sliding window only those with k > q - window. span 1 is causal; span = block size is block-causal.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from model.kernels.build import load_kernels

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
PIECE_FIELDS = 6


class Layout(ctypes.Structure):
    """As in attention.h. Holds addresses: the tensors must outlive it."""

    _fields_ = (
        ("pieces", c_void_p),
        ("page_table", c_void_p),
        ("where", c_void_p),
        ("piece_count", c_int64),
        ("page_count", c_int64),
        ("tokens", c_int64),
        ("page_size", c_int64),
        ("slots", c_int64),
    )


def make_layout(
    pieces: Tensor, page_table: Tensor, page_size: int, slots: int, tokens: int, where: Tensor | None = None
) -> Layout:
    """Raises ValueError for tensors that are not contiguous int64 of the right shape."""
    for name, tensor in (("pieces", pieces), ("page_table", page_table), ("where", where)):
        if tensor is not None and not (
            tensor.dtype == torch.int64 and tensor.is_contiguous() and tensor.device.type == "cpu"
        ):
            given = f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
            raise ValueError(f"{name} must be contiguous int64 on the CPU, not {given}")
    if pieces.dim() != 2 or pieces.shape[1] != PIECE_FIELDS:
        raise ValueError(f"pieces must be [P, {PIECE_FIELDS}], not {list(pieces.shape)}")
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    return Layout(
        pieces.data_ptr(),
        page_table.data_ptr(),
        None if where is None else where.data_ptr(),
        pieces.shape[0],
        page_table.numel(),
        tokens,
        page_size,
        slots,
    )


def raise_for_status(status: int) -> None:
    """Turn a status of the library into an exception."""
    if status == 1:
        raise IndexError("a piece, page, storage slot, token id or read index lies outside its tensor")
    if status == 2:
        raise MemoryError("the decoding kernels ran out of memory")


def available() -> bool:
    """Whether the kernels can be used here; compiles them on first call."""
    return load_kernels() is not None


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pieces: Tensor,
    page_table: Tensor,
    page_size: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """query [T, Hq, D], keys and values [S, Hkv, D] of one dtype -> [T, Hq, D]; tokens of no piece get zeros.

    float32 and float64 accumulate in their own precision; bfloat16 multiplies in bfloat16 and accumulates in float32.
    Raises ValueError for shapes or dtypes that do not fit, IndexError for a piece or page out of range.
    """
    library = load_kernels()
    if library is None:
        raise RuntimeError("the decoding kernels are not available: ask available() first")
    _check(query, keys, values)
    query = query.contiguous()
    out = torch.zeros_like(query)
    layout = make_layout(pieces, page_table, page_size, keys.shape[0], query.shape[0])
    status = library.blockcast_paged_attention(
        DTYPES[query.dtype],
        c_void_p(query.data_ptr()),
        c_void_p(keys.data_ptr()),
        c_void_p(values.data_ptr()),
        c_void_p(out.data_ptr()),
        ctypes.byref(layout),
        query.shape[1],
        keys.shape[1],
        query.shape[2],
        ctypes.c_double(scale),
        c_int64(-1 if window is None else window),
        torch.get_num_threads(),
    )
    raise_for_status(status)
    return out


def write_kv(keys: Tensor, values: Tensor, where: Tensor, key: Tensor, value: Tensor) -> None:
    """Store key and value [n, Hkv, D] in the slots `where` int64 [n] of keys and values [S, Hkv, D]."""
    keys.index_copy_(0, where, key.to(keys.dtype))
    values.index_copy_(0, where, value.to(values.dtype))


def _check(query: Tensor, keys: Tensor, values: Tensor) -> None:
    if query.dtype not in DTYPES or keys.dtype != query.dtype or values.dtype != query.dtype:
        raise ValueError(
            f"query, keys and values must share a float dtype: {query.dtype}, {keys.dtype}, {values.dtype}"
        )
    if any(t.device.type != "cpu" for t in (query, keys, values)):
        raise ValueError("query, keys and values must be on the CPU")
    fits = keys.shape == values.shape and keys.shape[2] == query.shape[2]
    if not fits or keys.shape[1] < 1 or query.shape[1] % keys.shape[1]:
        raise ValueError(f"shapes do not fit: {list(query.shape)}, {list(keys.shape)}, {list(values.shape)}")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values must be contiguous")
