"""Offloading becomes DeepSpeed's own settings, which DeepSpeed reads, or is refused with the key that helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.training.offload import Offload
from actors.training.settings import TrainSettings, deepspeed_settings
from actors.training.zero import build_extension, extensions_folder, optimizer_for_cpus
from model.errors import JobError, UserError
from tests.actors.training.test_train_settings import settings
from tests.gloo import train_all
from tests.training_runs import read_metrics


@pytest.mark.parametrize(
    ("stage", "offload", "expected"),
    [
        (1, Offload("cpu"), {"offload_optimizer": "cpu"}),
        (3, Offload("cpu", "cpu"), {"offload_optimizer": "cpu", "offload_param": "cpu"}),
        (3, Offload("nvme", "nvme", "/nvme"), {"offload_optimizer": "nvme", "offload_param": "nvme"}),
        (3, Offload("none", "cpu"), {"offload_param": "cpu"}),
        (0, Offload(), {}),
    ],
)
def test_deepspeed_reads_what_it_is_told(stage: int, offload: Offload, expected: dict[str, str]) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    told = settings(zero_stage=stage, offload=offload, device="cuda", workers=1)
    told.check()
    zero = deepspeed_settings(told)["zero_optimization"]
    read = DeepSpeedZeroConfig(**zero)
    assert read.stage == stage
    for name in ("offload_optimizer", "offload_param"):
        place = getattr(read, name)
        assert (None if place is None else place.device) == expected.get(name)
        if expected.get(name) == "nvme":
            assert str(place.nvme_path) == "/nvme"
    whole = "stage3_param_persistence_threshold" in zero
    assert whole == (stage == 3 and offload.parameters == "none"), "what is offloaded is not kept whole"


@pytest.mark.parametrize(
    ("stage", "device", "offload", "sentence"),
    [
        (3, "cpu", Offload("cpu"), "--train.offload.optimizer cpu makes room on a GPU"),
        (3, "cpu", Offload("none", "cpu"), "--train.offload.parameters cpu makes room on a GPU"),
        (2, "cuda", Offload("cpu", "cpu"), "set --train.zero_stage 3, not 2"),
        (0, "cuda", Offload("cpu"), "set --train.zero_stage to 1, 2 or 3"),
        (2, "cuda", Offload("nvme", "none", "/nvme"), "needs --train.zero_stage 3, not 2"),
        (3, "cuda", Offload("nvme"), "needs --train.offload.path"),
        (3, "cuda", Offload("cpu", "none", "/nvme"), "nothing is offloaded to nvme"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    stage: int, device: str, offload: Offload, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        settings(zero_stage=stage, device=device, offload=offload).check()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def for_cpus() -> None:
    optimizer_for_cpus([{"params": [torch.zeros(2)]}], {"lr": 0.1})


@pytest.mark.parametrize(
    ("build", "who"), [(for_cpus, "--train.offload.optimizer"), (build_extension, "training on CPUs")]
)
def test_without_a_compiler_what_needs_one_says_so_in_a_sentence(
    build: Callable[[], None], who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(JobError) as caught:
        build()
    assert "could not be compiled on" in str(caught.value) and "\n" not in str(caught.value)
    assert f"{who} needs a C++ compiler on every node" in str(caught.value)


def test_another_environment_compiles_in_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    here = extensions_folder()
    assert here == extensions_folder()
    monkeypatch.setattr(deepspeed, "__file__", "/another/venv/deepspeed/__init__.py")
    elsewhere = extensions_folder()
    assert here != elsewhere and here.parent == elsewhere.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_lies_in_the_machines_memory_takes_the_same_steps(
    at_length: bool, tiny_model: Path, training_rows: Path, tmp_path: Path
) -> None:
    """Two ranks, whose device is a CPU too; DeepSpeed compiles its optimizer for minutes, the first time."""
    if not at_length:
        pytest.skip("only at length")

    def told(name: str, stage: int, offload: Offload) -> TrainSettings:
        return settings(
            model=str(tiny_model), rows=str(training_rows), output=str(tmp_path / name), workers=2, steps=4,
            rows_per_step=5, learning_rate=5e-3, warmup_steps=2, weight_decay=0.1, zero_stage=stage, offload=offload,
        )  # fmt: skip

    kinds = {"optimizer": Offload("cpu"), "both": Offload("cpu", "cpu"), "nothing": Offload()}
    runs = {
        f"{name} {stage}": told(f"{name} {stage}", stage, offload)
        for name, offload in kinds.items()
        for stage in (1, 3)
        if stage == 3 or name != "both"
    }
    assert train_all(runs) == {}
    for name in runs:
        plain = read_metrics(tmp_path / f"nothing {name[-1]}")
        found = read_metrics(tmp_path / name)
        for figure, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3)):
            assert [line[figure] for line in found] == pytest.approx([line[figure] for line in plain], rel=tolerance)
