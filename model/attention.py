"""Attention by plan: transformers' decoders run unchanged, the plan decides who attends to whom.

`register_attention` makes `blockcast_attention` known to transformers' AttentionInterface as "blockcast". Every forward
passes `attention_plan=...`, and each layer hands its rotated queries, keys and values to `plan.attend`. Training plans
are here; the decoding plan, which owns the cache, is in `model.decoding`.

`StreamPlan` is the three-stream (or causal) training attention over the layout of `model.layout`:
    [ clean blocks of all documents | (causal blocks) | noisy blocks, both views ]
A query's keys are one contiguous stretch before the noisy part plus, when noisy, its own block. So no 3L x 3L mask
exists: the first part is walked in tiles of queries against the stretch of keys that their documents reach, the own
blocks are one batched call, and the two softmaxes are merged by their log-sum-exps. The backward pass recomputes each
tile from the merged output and log-sum-exp (as ring attention does), so what is kept grows with the tokens only.
On CUDA the same predicate drives compiled flex attention. Capped scores (Gemma 2) take the plain path of
`model.capping` on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from model.capping import capped_attention, capped_score
from model.errors import UserError
from model.masks import Predicate, Tokens

NAME = "blockcast"
TILE = 128  # query tokens a tile; bounds the mask of a tile to TILE x reachable keys
FORBIDDEN = -1e9  # finite: an all-forbidden tile row gets weight exp(-1e9 - lse) = 0 in the merge, never NaN


class AttentionPlan(Protocol):
    """What a forward needs to know about its tokens."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D], rotated; returns [1, Hq, T, D]."""
        ...


@runtime_checkable
class CappingPlan(AttentionPlan, Protocol):
    """A plan that also attends with capped scores, cap * tanh(score / cap) (Gemma 2)."""

    def attend_capped(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float,
    ) -> Tensor:
        """As `attend`."""
        ...


def blockcast_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer. Returns ([1, T, Hq, D], no weights)."""
    if attention_plan is None:
        raise UserError(
            "A Blockcast model was called without attention_plan: pass one, or load it with attn_implementation='sdpa'."
        )
    if s_aux is not None:
        raise UserError(f"{type(module).__name__} uses attention sinks, which Blockcast does not support yet.")
    if dropout:
        raise UserError("Attention dropout is not supported: set attention_dropout to 0 in the model's config.json.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast(int, module.layer_idx)
    if softcap is not None:
        if not isinstance(attention_plan, CappingPlan):
            raise UserError(f"{type(module).__name__} caps its attention scores, which this forward's plan cannot do.")
        out = attention_plan.attend_capped(layer, query, key, value, scale, sliding_window, softcap)
    else:
        out = attention_plan.attend(layer, query, key, value, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> str:
    """What a model is built with as attn_implementation, known to transformers from here on: `NAME`."""
    from transformers.modeling_utils import AttentionInterface  # seconds, which a job that builds no model saves

    AttentionInterface.register(NAME, blockcast_attention)
    return NAME


class Tile(NamedTuple):
    """Queries [q0, q1) of the whole sequence against clean keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int


@dataclass
class StreamPlan:
    """Attention of one packed training sequence of T tokens: `clean` tokens first, then the noisy blocks.

    tokens: where each of the T tokens stands. predicate: who may attend (noisy tokens see their own block anyway).
    unread: the first tokens, whose output of layer `last_layer` nobody reads: their queries are left out there. A
    causal stream counts among the clean tokens, behind the unread ones, under document ids of its own.
    """

    tokens: Tokens
    clean: int
    block_size: int
    predicate: Predicate
    last_layer: int
    unread: int = 0
    tiles: list[Tile] = field(init=False)
    _flex: dict[int | None, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tiles = list(self._make_tiles())

    @property
    def length(self) -> int:
        return int(self.tokens.stream.numel())

    def _make_tiles(self) -> Iterator[Tile]:
        document = self.tokens.document.tolist()
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index in range(self.clean):
            first.setdefault(document[index], index)
            last[document[index]] = index + 1
        step = max(TILE // self.block_size, 1) * self.block_size
        for begin, end in ((0, self.unread), (self.unread, self.clean), (self.clean, self.length)):
            for q0 in range(begin, end, step):
                q1 = min(q0 + step, end)
                reached = [d for d in dict.fromkeys(document[q0:q1]) if d in first]
                if reached:
                    yield self._shrink(Tile(q0, q1, min(first[d] for d in reached), max(last[d] for d in reached)))

    def _shrink(self, tile: Tile) -> Tile:
        """Cut the key stretch to what the predicate really reaches (a late block of a long document is not reached)."""
        reached = self._allowed(tile, None).any(0).nonzero()
        if not len(reached):
            return Tile(tile.q0, tile.q1, tile.k0, tile.k0)
        return Tile(tile.q0, tile.q1, tile.k0 + int(reached[0]), tile.k0 + int(reached[-1]) + 1)

    def _allowed(self, tile: Tile, sliding_window: int | None) -> Tensor:
        q = self.tokens.at((slice(tile.q0, tile.q1), None))
        k = self.tokens.at((None, slice(tile.k0, tile.k1)))
        return within_window(self.predicate(q, k), q, k, sliding_window)

    def bias(self, tile: Tile, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [1, 1, q, k] of a tile."""
        allowed = self._allowed(tile, sliding_window)
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.zeros(allowed.shape, dtype=kind, device=allowed.device).masked_fill_(~allowed, FORBIDDEN)[
            None, None
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        if query.is_cuda:
            return self._attend_flex(query, key, value, scale, sliding_window)
        out: Tensor = _StructuredAttention.apply(
            query, key, value, self, scale, sliding_window, layer == self.last_layer
        )
        return out

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        if query.is_cuda:
            return self._attend_flex(query, key, value, scale, window, capped_score(softcap))

        def allowed(rows: slice) -> Tensor:
            q, k = self.tokens.at((rows, None)), self.tokens.at((None, slice(None)))
            return within_window(self.predicate(q, k), q, k, window)

        return capped_attention(query, key, value, allowed, scale, softcap)

    def _attend_flex(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None, score_mod: Any = None
    ) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask

        if sliding_window not in self._flex:
            self._flex[sliding_window] = create_block_mask(
                self.mask_mod(sliding_window), None, None, self.length, self.length, device=str(query.device)
            )
        return compiled_flex(dynamic=query.is_cuda)(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=self._flex[sliding_window],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def mask_mod(self, sliding_window: int | None) -> Any:
        """The predicate in flex attention's form."""

        def allowed(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q, k = self.tokens.at(q_index), self.tokens.at(k_index)
            return within_window(self.predicate(q, k), q, k, sliding_window)

        return allowed


def within_window(allowed: Tensor, q: Tokens, k: Tokens, sliding_window: int | None) -> Tensor:
    """A sliding-window layer also forgets keys that lie `sliding_window` or more positions back."""
    return allowed if sliding_window is None else allowed & (q.position - k.position < sliding_window)


@cache
def compiled_flex(dynamic: bool) -> Any:
    """flex_attention compiled once; `dynamic` for shapes that change from batch to batch.

    On CPU torch 2.13 generates C++ that does not compile when a dynamic kernel meets a second shape: static there.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic)


class _StructuredAttention(torch.autograd.Function):
    """Tiles against clean keys, own blocks in one batch, merged by log-sum-exp.

    What is kept for the backward pass is kept once: keys and values with their own few heads, which are expanded to the
    queries' again there, and an output whose memory is [B, T, H, D], the order in which the next layer keeps it too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: StreamPlan,
        scale: float,
        window: int | None,
        last: bool,
    ) -> Tensor:
        saved = (query, key, value)
        key, value = _expanded(key, query), _expanded(value, query)
        out = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = query.new_full(query.shape[:3], FORBIDDEN, dtype=_accumulator(query.dtype))
        for tile in _needed(plan, last):
            q = query[:, :, tile.q0 : tile.q1]
            k, v = key[:, :, tile.k0 : tile.k1], value[:, :, tile.k0 : tile.k1]
            bias = plan.bias(tile, window, query.dtype)
            tile_out, tile_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, False, attn_mask=bias, scale=scale
            )
            out[:, :, tile.q0 : tile.q1], lse[:, :, tile.q0 : tile.q1] = tile_out, tile_lse
        if plan.length > plan.clean:
            own = [_as_blocks(x, plan) for x in (query, key, value)]
            own_out, own_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*own, 0.0, False, scale=scale)
            _merge(out[:, :, plan.clean :], lse[:, :, plan.clean :], _from_blocks(own_out), _from_blocks(own_lse))
        ctx.save_for_backward(*saved, out, lse)
        ctx.call = (plan, scale, window, last)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        heads = key.shape[1]
        key, value = _expanded(key, query), _expanded(value, query)
        plan, scale, window, last = ctx.call
        grad_out = grads[0].contiguous()
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (query, key, value))
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for tile in _needed(plan, last):
            rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            bias = plan.bias(tile, window, query.dtype)
            dq, dk, dv = backward(
                grad_out[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys],
                out[:, :, rows], lse[:, :, rows], 0.0, False, attn_mask=bias, scale=scale,
            )  # fmt: skip
            grad_q[:, :, rows] += dq
            grad_k[:, :, keys] += dk
            grad_v[:, :, keys] += dv
        if plan.length > plan.clean:
            blocks = [_as_blocks(x, plan) for x in (grad_out, query, key, value, out, lse)]
            own = backward(*blocks, 0.0, False, scale=scale)
            for total, part in zip((grad_q, grad_k, grad_v), own, strict=True):
                total[:, :, plan.clean :] += _from_blocks(part)
        return grad_q, _gathered(grad_k, heads), _gathered(grad_v, heads), None, None, None, None


def _expanded(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values [B, Hkv, T, D], each head once for every query head that reads it, [B, H, T, D]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _gathered(grad: Tensor, heads: int) -> Tensor:
    """The gradient of what `_expanded` made, for the heads there were."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _needed(plan: StreamPlan, last: bool) -> Iterator[Tile]:
    """Tiles that have keys, in the last layer without those whose output nobody reads."""
    return (t for t in plan.tiles if t.k1 > t.k0 and not (last and t.q0 < plan.unread))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as_blocks(x: Tensor, plan: StreamPlan) -> Tensor:
    """Noisy part of [1, H, T, ...] as [blocks, H, K, ...]."""
    noisy = x[0, :, plan.clean :]
    return noisy.unflatten(1, (-1, plan.block_size)).transpose(0, 1).contiguous()


def _from_blocks(x: Tensor) -> Tensor:
    """[blocks, H, K, ...] back to [1, H, blocks * K, ...]."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge a second softmax over other keys into (out, lse), in place."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_(torch.exp(lse - total)[..., None].to(out.dtype))
    out.add_(other_out * torch.exp(other_lse - total)[..., None].to(out.dtype))
    lse.copy_(total)
