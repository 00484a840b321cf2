"""Structured attention == dense attention == flex attention, over random packed rows, windows and head groupings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import attention
from model.ablations import supervised_where
from model.attention import StreamPlan
from model.backbone import load_backbone
from model.errors import UserError
from model.layout import RowBatch, lay_out_causal, lay_out_streams
from model.masks import dense
from tests.model.rows import random_rows
from tests.oracles import DensePlan

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def plan_of(
    rows: RowBatch, *, causal: bool = False, keep_all: bool = False, block_size: int = 8, streams: int = 3
) -> StreamPlan:
    """streams: of the noisy kind of plan, two (one view) to four (a causal one beside the clean one)."""
    mask = torch.rand(rows.input_ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    if causal:
        return lay_out_causal(rows, block_size=block_size, last_layer=9).plan
    views = (rows.input_ids, rows.input_ids)[: 1 if streams == 2 else 2]
    rows = supervised_where(rows, mask) if streams == 2 else rows
    weight = 0.5 if streams == 4 else 0.0
    laid_out = lay_out_streams(
        rows, mask, views, block_size=block_size, last_layer=9, keep_all=keep_all, causal_weight=weight
    )
    return laid_out.plan


def qkv(plan: StreamPlan, seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, plan.length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]


def allowed(plan: StreamPlan, window: int | None) -> torch.Tensor:
    mask = dense(plan.predicate, plan.tokens)
    distance = plan.tokens.position[:, None] - plan.tokens.position[None]
    return mask if window is None else mask & (distance < window)


def out_and_gradients(
    plan: attention.CappingPlan, inputs: list[torch.Tensor], window: int | None, cap: float | None = None
) -> list[torch.Tensor]:
    for x in inputs:
        x.grad = None
    capped = cap is not None
    out = plan.attend_capped(0, *inputs, 0.3, window, cap) if capped else plan.attend(0, *inputs, 0.3, window)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad.clone() for x in inputs if x.grad is not None)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    causal=st.booleans(),
    streams=st.sampled_from([2, 3, 4]),
    keep_all=st.booleans(),
    window=st.sampled_from([None, 16, 40]),
    tile=st.sampled_from([8, 32, 128]),
    cap=st.sampled_from([None, None, 0.5]),
)
def test_structured_attention_and_its_gradients_equal_the_dense_mask(
    seed: int,
    rows: int,
    blocks: int,
    block_size: int,
    causal: bool,
    streams: int,
    keep_all: bool,
    window: int | None,
    tile: int,
    cap: float | None,
) -> None:
    before, attention.TILE = attention.TILE, tile
    try:
        batch = random_rows(seed, rows=rows, blocks=blocks, block_size=block_size)
        plan = plan_of(batch, causal=causal, keep_all=keep_all, block_size=block_size, streams=streams)
    finally:
        attention.TILE = before
    inputs = qkv(plan, seed)
    ours = out_and_gradients(plan, inputs, window, cap)
    oracle = out_and_gradients(DensePlan(allowed(plan, window)), inputs, window, cap)
    for left, right in zip(ours, oracle, strict=True):
        assert float((left - right).abs().max()) < 1e-12 * max(1.0, float(right.abs().max()))


def test_in_bfloat16_the_gradients_stay_within_rounding_of_the_float32_ones() -> None:
    plan = plan_of(random_rows(1, rows=2, blocks=12))
    exact = out_and_gradients(plan, qkv(plan, 1, torch.float32), None)
    rounded = out_and_gradients(plan, qkv(plan, 1, torch.bfloat16), None)
    for left, right in zip(rounded, exact, strict=True):
        assert float((left.float() - right).abs().max()) < 0.03 * float(right.abs().max())


@pytest.mark.slow
def test_flex_attention_forward_equals_the_structured_form() -> None:
    plan = plan_of(random_rows(2, rows=2, blocks=8))
    inputs = [x.detach().float() for x in qkv(plan, 2)]
    ours = plan.attend(0, *inputs, 0.3, None)
    flex = plan._attend_flex(*inputs, 0.3, None)
    assert float((ours - flex).abs().max()) < 1e-5


def test_the_last_layer_skips_the_clean_queries_that_nobody_reads() -> None:
    plan = plan_of(random_rows(3, blocks=8))
    inputs = [x.detach() for x in qkv(plan, 3)]
    whole, last = plan.attend(0, *inputs, 0.3, None), plan.attend(plan.last_layer, *inputs, 0.3, None)
    assert torch.equal(whole[:, :, plan.clean :], last[:, :, plan.clean :])
    assert not last[:, :, : plan.clean].any() and whole[:, :, : plan.clean].any()


def test_what_backward_keeps_grows_with_the_tokens_and_not_with_their_square() -> None:
    def kept(blocks: int) -> int:
        rows = random_rows(4, rows=1, blocks=blocks, block_size=16).without_documents()
        plan = plan_of(rows, keep_all=True, block_size=16)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            plan.attend(0, *qkv(plan, 4, torch.float32), 0.3, None)
        return sum(sizes)

    small, large = kept(16), kept(64)
    assert small > 0
    assert large <= 4.01 * small


def test_no_tile_is_wider_than_the_keys_its_documents_reach() -> None:
    plan = plan_of(random_rows(5, rows=3, blocks=24))
    reach = dense(plan.predicate, plan.tokens)[:, : plan.clean]
    for tile in plan.tiles:
        columns = reach[tile.q0 : tile.q1].any(0).nonzero()[:, 0]
        if len(columns):
            assert (tile.k0, tile.k1) == (int(columns[0]), int(columns[-1]) + 1)
    assert sum((t.q1 - t.q0) * (t.k1 - t.k0) for t in plan.tiles) < 0.5 * plan.length * plan.clean


def test_what_attention_cannot_do_is_refused_with_a_sentence(tiny_model: Path) -> None:
    backbone = load_backbone(tiny_model)
    with pytest.raises(UserError, match="without attention_plan"):
        backbone.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    plan = plan_of(random_rows(6))
    module, (q, k, v) = backbone.model.model.layers[0].self_attn, qkv(plan, 6)
    with pytest.raises(UserError, match="uses attention sinks"):
        attention.blockcast_attention(module, q, k, v, None, attention_plan=plan, s_aux=q)
    with pytest.raises(UserError, match="dropout"):
        attention.blockcast_attention(module, q, k, v, None, attention_plan=plan, dropout=0.1)


@pytest.mark.gpu
def test_on_cuda_flex_attention_and_its_gradients_equal_the_dense_mask() -> None:
    plan = plan_of(random_rows(7, rows=2, blocks=16))
    on_device = replace(plan, tokens=plan.tokens._replace(**{n: t.cuda() for n, t in plan.tokens._asdict().items()}))
    inputs = [x.detach().float().cuda().requires_grad_() for x in qkv(plan, 7)]
    ours = out_and_gradients(on_device, inputs, None)
    oracle = out_and_gradients(DensePlan(allowed(plan, None).cuda()), inputs, None)
    for left, right in zip(ours, oracle, strict=True):
        assert float((left - right).abs().max()) < 1e-2 * max(1.0, float(right.abs().max()))
