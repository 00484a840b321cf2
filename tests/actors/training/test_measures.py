"""What is measured beside the loss: noise levels, a step's clock, arithmetic; and that measuring changes nothing."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from actors.training import clock as clock_module
from actors.training.ar_loss import CausalTally
from actors.training.clock import OTHER, PHASES, StepClock, watch_collectives
from actors.training.flops import FlopCount, TwoTowerFlops, peak_flops
from actors.training.noise import LEVELS, NoiseTally, level_name, mean_by_level
from model.backbone import Backbone, load_backbone
from model.corruption import IGNORED, draw_noise, row_generator
from model.layout import TrainingBatch
from model.objective import BlockDiffusion, TrainingModel, make_objective, token_losses
from model.two_tower.training import TwoTowerTraining, read_context
from tests.model.rows import MASK, random_rows
from tests.towers import chat_rows, laid_out, shared_towers

K = 8
ROWS = 8


@pytest.fixture(scope="module")
def backbone(tiny_model: Path) -> Backbone:
    return load_backbone(tiny_model)


def batch_of(backbone: Backbone, name: str = "block_diffusion") -> TrainingBatch:
    kind = make_objective(name, block_size=K, mask_token_id=MASK, seed=0, layers=backbone.layers)
    return kind.batch(random_rows(0, rows=ROWS), range(ROWS), 0)


# Noise levels ---------------------------------------------------------------------------------------------------------


def test_a_prediction_knows_the_mask_ratio_of_its_block_in_the_view_that_masks_it() -> None:
    rows = random_rows(1, rows=ROWS)
    objective = BlockDiffusion(K, MASK, seed=0, last_layer=1)
    batch = objective.batch(rows, range(ROWS), 0)
    expected = []
    for row in range(ROWS):
        ratios, mask = draw_noise(rows.input_ids.shape[1], K, row_generator(0, row, 0))
        for position in (rows.labels[row] != IGNORED).nonzero()[:, 0].tolist():
            if rows.position_ids[row, position]:  # a document's first token is not predicted
                t = ratios[position // K].item()
                expected.append(t if mask[position] else 1 - t)
    assert batch.noise is not None
    assert batch.noise.tolist() == pytest.approx(expected)


def test_the_levels_of_a_step_add_up_to_its_loss(backbone: Backbone) -> None:
    tally, batch = NoiseTally(), batch_of(backbone)
    with torch.no_grad():
        total = TrainingModel(backbone.model, tally.add)(batch)
        losses = token_losses(backbone.model, batch)
    assert sum(tally.values[:LEVELS]) == pytest.approx(total.item(), rel=1e-6)
    assert sum(tally.values[LEVELS:]) == len(batch.slots)
    means = mean_by_level(tally.values)
    assert means is not None and batch.noise is not None
    for level in range(LEVELS):
        mine = losses[(batch.noise >= level / LEVELS) & (batch.noise < (level + 1) / LEVELS)]
        assert means[level] == pytest.approx(mine.mean().item(), rel=1e-6)
    tally.clear()
    assert mean_by_level(tally.values) is None


def test_the_control_has_no_noise_levels(backbone: Backbone) -> None:
    tally = NoiseTally()
    with torch.no_grad():
        TrainingModel(backbone.model, tally.add)(batch_of(backbone, "next_token"))
    assert mean_by_level(tally.values) is None


def test_a_batch_without_supervised_tokens_counts_nowhere(backbone: Backbone) -> None:
    rows = random_rows(0, rows=1)
    rows.labels.fill_(IGNORED)
    tally = NoiseTally()
    with torch.no_grad():
        TrainingModel(backbone.model, tally.add)(BlockDiffusion(K, MASK, 0, 1).batch(rows, [0], 0))
    assert tally.values == [0.0] * (2 * LEVELS)


def test_the_next_token_part_is_what_the_control_would_lose_on_the_same_rows(backbone: Backbone) -> None:
    rows, tally, weight = random_rows(0, rows=ROWS), CausalTally(), 0.25
    options = {"block_size": K, "mask_token_id": MASK, "seed": 0, "layers": backbone.layers}
    both = make_objective("block_diffusion", ar_loss_weight=weight, **options)  # type: ignore[arg-type]
    model = TrainingModel(backbone.model, tally.add)
    with torch.no_grad():
        total = model(both.batch(rows, range(ROWS), 0)).item()
        found = tally.value
        tally.clear()
        blocks = model(batch_of(backbone)).item()
        assert tally.value == 0.0, "the blocks' predictions do not count"
        control = TrainingModel(backbone.model)(batch_of(backbone, "next_token")).item()
    assert found == pytest.approx(control, rel=1e-5)
    assert blocks + weight * found == pytest.approx(total, rel=1e-5)


def test_levels_are_named_by_their_mask_ratios() -> None:
    assert [level_name(i) for i in range(LEVELS)] == ["0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1"]


def test_watching_a_step_changes_no_bit_of_its_loss_or_gradients(backbone: Backbone) -> None:
    found = []
    for tally in (NoiseTally(), None):
        model = TrainingModel(copy.deepcopy(backbone.model).train(), tally.add if tally else None)
        loss = model(batch_of(backbone))
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    (loss, gradients), (bare_loss, bare_gradients) = found
    assert torch.equal(loss, bare_loss)
    assert all(torch.equal(one, other) for one, other in zip(gradients, bare_gradients, strict=True))


# The clock ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is one second after the last."""
    ticks = itertools.count()
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: float(next(ticks)))


def test_a_phase_inside_another_stops_the_outer_one(ticking: None) -> None:
    clock = StepClock("cpu")
    clock.begin()
    with clock.phase("forward"):
        pass
    with clock.phase("backward"), clock.phase("communication"):
        pass
    seconds = clock.end()
    assert seconds == {"data": 0, "forward": 1, "backward": 2, "optimizer": 0, "communication": 1, OTHER: 3}
    assert set(seconds) == {*PHASES, OTHER}


def test_what_happens_between_steps_is_on_no_clock(ticking: None) -> None:
    clock = StepClock("cpu")
    with clock.phase("communication"):
        pass
    clock.begin()
    clock.end()
    with clock.phase("communication"):
        pass
    clock.begin()
    assert clock.end() == {**dict.fromkeys(PHASES, 0), OTHER: 1}


def test_a_collective_and_the_wait_for_it_are_communication(ticking: None) -> None:
    class Work:
        def wait(self) -> str:
            return "waited"

    class Backend:
        name = "backend"

        def all_reduce(self, async_op: bool = False) -> Work | None:
            return Work() if async_op else None

        def get_rank(self) -> int:
            return 7

    clock = StepClock("cpu")
    backend: Any = watch_collectives(Backend(), clock)
    clock.begin()
    with clock.phase("backward"):
        handle = backend.all_reduce(async_op=True)
        assert backend.all_reduce() is None
        assert handle.wait() == "waited"
    assert backend.get_rank() == 7
    assert clock.end()["communication"] == 3
    backend.name = "renamed"
    assert backend._inner.name == "renamed"


def test_deepspeeds_collectives_have_the_names_that_are_watched() -> None:
    from deepspeed.comm.torch import TorchBackend

    lacking = [name for name in clock_module.COLLECTIVES if not hasattr(TorchBackend, name)]
    assert not lacking


# Arithmetic -----------------------------------------------------------------------------------------------------------


def test_operations_are_those_that_torch_counts_in_matrix_products(backbone: Backbone) -> None:
    model, batch = copy.deepcopy(backbone.model).train(), batch_of(backbone)
    with FlopCounterMode(display=False) as counter:
        TrainingModel(model)(batch).backward()
    products = _products(counter)
    count = FlopCount.of(model)
    assert count is not None
    assert count.step([batch]) == products
    model.requires_grad_(False)
    frozen = FlopCount.of(model)
    assert frozen is not None
    assert frozen.step([batch]) == pytest.approx(products * 2 / 3)


def test_of_two_towers_the_frozen_one_runs_forward_only() -> None:
    towers, rows = shared_towers("llama"), chat_rows()
    batch = laid_out(towers, rows, keep_all=False)
    module = TwoTowerTraining(towers.writer())
    count = FlopCount.of(towers.writer().causal_lm)
    assert count is not None
    with FlopCounterMode(display=False) as counter:
        states = read_context(towers.context, batch)
    read = _products(counter)
    with FlopCounterMode(display=False) as counter:
        module(batch, states).backward()
    towers.writer().zero_grad()
    assert read == 2 * count.layers * batch.context_ids.numel() + 2 * count.head  # of one token, for ZeRO's sake
    # beyond the count: the time conditioning, a few products a document
    assert TwoTowerFlops(count).step([batch]) == pytest.approx(read + _products(counter), rel=0.1)


def _products(counter: FlopCounterMode) -> int:
    counted = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    return sum(count for name, count in counted.items() if name in ("aten.mm", "aten.addmm"))


def test_the_peak_is_the_makers_for_the_devices_whole_name() -> None:
    for name, peak in (
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
    ):
        assert peak_flops(name, "bfloat16") == peak
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("AMD EPYC 9B14", "bfloat16") is None
