"""The denoiser as the engine runs it: the C++ forward with time vectors equals the hooks in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.decoding.packing import Packed, Slots
from model.kernels.fused import FusedForward, TimeVectors
from model.two_tower.reader import BOTH_WAYS, Reader, Stretch
from model.two_tower.towers import TwoTower
from model.two_tower.writer import DenoiserWriter
from tests.paged import needs_kernels
from tests.towers import BLOCK, MASK, relative_error, tiny_lora_towers, tiny_towers

TIMES = (1.0, 0.25, 0.75)


def canvases_behind_text(towers: TwoTower) -> tuple[Reader, list[Stretch], torch.Tensor]:
    """Three rows of different lengths, read by the context tower, and a canvas for each."""
    reader, stretches = Reader(towers, tokens=32, rows=3), [Stretch() for _ in range(3)]
    for i, stretch in enumerate(stretches):
        reader.extend([stretch], torch.arange(5, 10 + 4 * i)[None])
    canvases = torch.full((3, BLOCK), MASK)
    canvases[1, 1:], canvases[2, 2] = torch.tensor([11, 12, 13]), 14
    return reader, stretches, canvases


def packed_round(reader: Reader, rows: list[Stretch], canvases: torch.Tensor) -> Packed:
    """The canvases as the engine packs them, every slot read."""
    plan, positions = reader._plan(rows, BLOCK, 0, span=BOTH_WAYS)
    read = torch.arange(canvases.numel())
    slots = Slots(np.zeros(len(read)), read.numpy(), np.zeros(len(read)), np.zeros(len(read)))
    return Packed(canvases.view(1, -1), positions.reshape(1, -1), read, plan.plan, slots)


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_fused_denoiser_equals_the_hooks_at_every_row_s_own_time(kind: str) -> None:
    towers = tiny_towers(kind, torch.float32)
    reader, rows, canvases = canvases_behind_text(towers)
    times, row_of = torch.tensor(TIMES, dtype=torch.float64), torch.arange(3).repeat_interleave(BLOCK)
    expected = reader.denoise(rows, canvases, times).flatten(0, 1)
    for weights, kernels, tolerance in (("model", False, 1e-6), ("model", True, 1e-5), ("int8", True, 0.2)):
        writer = DenoiserWriter(towers)
        writer.prepare(weights=weights, kernels=kernels)
        assert (writer._fused is not None) == kernels
        logits = writer(packed_round(reader, rows, canvases), times, row_of, [{}] * 3)
        assert relative_error(logits, expected) < tolerance
    swapped = writer(packed_round(reader, rows, canvases), times.flip(0), row_of, [{}] * 3)
    assert relative_error(swapped, expected) > 1e-3, "the time matters"


def test_a_mixed_forward_s_logits_are_the_same_bits_however_many_are_read() -> None:
    towers = tiny_lora_towers("llama", torch.float32)
    reader, rows, canvases = canvases_behind_text(towers)
    writer, packed = DenoiserWriter(towers), packed_round(reader, rows, canvases)
    times, row_of = torch.tensor(TIMES, dtype=torch.float64), torch.arange(3).repeat_interleave(BLOCK)

    def logits(read: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            told = replace(packed, read=read, slots=replace(packed.slots, read=read.numpy()))
            return writer.mixed(told, times, row_of)

    whole = logits(packed.read)
    expected = reader.denoise(rows, canvases, times).flatten(0, 1)
    assert relative_error(whole, expected) < 1e-6
    for count in range(1, 8):
        assert torch.equal(logits(packed.read[-count:]), whole[-count:])


@needs_kernels
def test_time_vectors_that_do_not_fit_are_refused() -> None:
    towers = tiny_towers("llama", torch.float32)
    reader, rows, canvases = canvases_behind_text(towers)
    denoiser = towers.writer()
    fused = FusedForward.build(denoiser.causal_lm, "float32", denoiser.modulation.set_all)
    assert fused is not None
    assert FusedForward.build(denoiser.causal_lm) is None, "hooks that nobody answers for"
    packed, cache = packed_round(reader, rows, canvases), reader.cache
    vectors = TimeVectors.padded(denoiser.time(torch.tensor([0.5])))
    which = torch.zeros(canvases.numel(), dtype=torch.int64)
    for table, index, kind in (
        (vectors, which + 1, IndexError),
        (vectors, which[1:], ValueError),
        (TimeVectors.padded(vectors.table[:2]), which, ValueError),
    ):
        with pytest.raises(kind):
            fused(
                packed.ids, packed.positions, *packed.plan.descriptors, cache.page_size, packed.plan.where,
                cache.keys, cache.values, packed.read, (table, index),
            )  # fmt: skip
