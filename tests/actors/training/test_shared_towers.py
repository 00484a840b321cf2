"""Two towers with one copy of the weights, trained: the steps of a plain loop, and only the adapter is kept.

All runs share one start of two gloo ranks (tests/gloo.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.training.settings import EvaluationSettings, TrainSettings, TwoTowerSettings
from model.adapters import LoraSettings
from model.backbone import load_backbone
from model.errors import UserError
from model.two_tower.folder import TwoTowerModel, load_two_tower, make_two_tower
from model.two_tower.shared import SharedDenoiser
from model.two_tower.training import TwoTowerObjective, held_out_bound
from pipelines.assessment.held_out import each_row
from tests.actors.training.test_train_settings import settings
from tests.actors.training.test_two_tower import BLOCK, HELD_OUT_ROWS, RATE, SAVED, STEPS, held_out, plain_losses
from tests.gloo import train_all
from tests.packed import counting_rows, write_rows
from tests.training_runs import FORM, MASK, MICRO_ROWS, ROWS_PER_STEP, read_metrics, timeless, write_training_rows

pytestmark = pytest.mark.slow
LORA = LoraSettings(4, 8.0, ("all-linear",))


def told(**changes: Any) -> TrainSettings:
    keys: dict[str, Any] = {
        "objective": "two_tower", "two_tower": TwoTowerSettings(BLOCK, denoiser="lora"), "lora": LORA, "workers": 2,
        "steps": STEPS, "rows_per_step": ROWS_PER_STEP, "micro_rows": MICRO_ROWS, "learning_rate": RATE,
        "warmup_steps": 5, "schedule": "constant", "weight_decay": 0.1, "dtype": "float32", "checkpoint_every": SAVED,
    }  # fmt: skip
    return settings(**{**keys, **changes})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_training_rows(tmp_path_factory.mktemp("shared") / "rows")
    write_rows(folder / "held_out", counting_rows(4, mask_token_id=MASK), FORM)
    return folder


@pytest.fixture(scope="module")
def runs(tiny_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs by name: a run under ZeRO-3, one that takes it up at its first checkpoint, and one under ZeRO-2 with
    activations recomputed and the base model named instead of copied."""
    root = tmp_path_factory.mktemp("shared")
    evaluation = EvaluationSettings(SAVED, str(rows / "held_out"), HELD_OUT_ROWS, 2, 10)
    (root / "resumed" / "checkpoints").mkdir(parents=True)
    (root / "resumed" / "checkpoints" / f"step_{SAVED}").symlink_to(root / "whole" / "checkpoints" / f"step_{SAVED}")
    reference = TwoTowerSettings(BLOCK, denoiser="lora", context="reference")
    changes: dict[str, dict[str, Any]] = {
        "whole": {"zero_stage": 3, "evaluation": evaluation},
        "resumed": {"zero_stage": 3, "evaluation": evaluation},
        "recomputed": {"zero_stage": 2, "activation_checkpointing": True, "steps": 3, "two_tower": reference},
    }
    common = {"model": str(tiny_model), "rows": str(rows)}
    said = train_all({name: told(**{**common, "output": str(root / name), **more}) for name, more in changes.items()})
    assert said == {}
    return root


def begun(folder: Path) -> TwoTowerModel:
    """The towers as the workers make them, drawn under the run's seed."""
    torch.manual_seed(0)
    return make_two_tower(load_backbone(folder), block_size=BLOCK, lora=LORA)


def trained_weights(output: Path) -> dict[str, torch.Tensor]:
    model = output / "model"
    files = (model / "denoiser" / "adapter_model.safetensors", *sorted(model.glob("*.safetensors")))
    return {f"{path.name}: {name}": tensor for path in files for name, tensor in load_file(path).items()}


def test_two_workers_take_the_steps_of_a_plain_loop_under_zero_3_and_zero_2(
    runs: Path, tiny_model: Path, rows: Path
) -> None:
    expected = plain_losses(begun(tiny_model), rows, told())
    for name, count in (("whole", STEPS), ("recomputed", 3)):
        lines = read_metrics(runs / name)
        assert len(lines) == count
        for line, (loss, norm) in zip(lines, expected, strict=False):
            assert line["loss"] == pytest.approx(loss, rel=1e-4)
            assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_a_run_taken_up_again_repeats_every_bit(runs: Path) -> None:
    again = timeless(read_metrics(runs / "resumed"))
    assert [line["step"] for line in again] == list(range(SAVED + 1, STEPS + 1))
    assert again == timeless(read_metrics(runs / "whole"))[SAVED:]
    ours, theirs = trained_weights(runs / "resumed"), trained_weights(runs / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_written_model_is_an_adapter_over_the_untouched_base(runs: Path, tiny_model: Path, rows: Path) -> None:
    base = load_file(tiny_model / "model.safetensors")
    context = load_file(runs / "whole" / "model" / "context" / "model.safetensors")
    assert base.keys() == context.keys() and all(torch.equal(base[name], context[name]) for name in base)
    assert not (runs / "recomputed" / "model" / "context").exists()
    assert not (runs / "whole" / "model" / "denoiser" / "model.safetensors").exists()
    before = dict(begun(tiny_model).towers.writer().named_parameters())
    model = load_two_tower(runs / "whole" / "model")
    writer = model.towers.writer()
    assert isinstance(writer, SharedDenoiser) and writer.adapter.settings.rank == LORA.rank
    assert all(not torch.equal(parameter, before[name]) for name, parameter in writer.named_parameters())
    assert isinstance(load_two_tower(runs / "recomputed" / "model").towers.writer(), SharedDenoiser)
    last = read_metrics(runs / "whole")[-1]
    maker = TwoTowerObjective(BLOCK, MASK, 0, document_rows=False)
    assert last["held_out_bound"] == pytest.approx(
        held_out_bound(model.towers, maker, each_row(held_out(rows))).bound, rel=1e-5
    )
    assert (runs / "whole" / "samples.jsonl").read_text().count("\n") == 4


def test_checkpoints_hold_the_adapter_and_the_time_conditioning_only(runs: Path, tiny_model: Path) -> None:
    folder = runs / "whole" / "checkpoints" / f"step_{STEPS}" / "zero"
    shards = sorted(folder.glob("zero_pp_rank_*_model_states.pt"))
    shapes = torch.load(shards[0], weights_only=False)["param_shapes"]
    names = {name for group in shapes for name in group}
    assert {name.split(".")[1] for name in names} == {"adapter", "time"}
    assert len(names) == len(list(begun(tiny_model).towers.writer().parameters()))


def test_one_copy_of_the_weights_is_not_shared_out() -> None:
    sharded = TwoTowerSettings(BLOCK, denoiser="lora", context_weights="sharded")
    with pytest.raises(UserError, match=r"with --two_tower\.denoiser lora every worker holds the one copy"):
        told(two_tower=sharded).check()
