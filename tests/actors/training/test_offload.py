"""Offloading becomes DeepSpeed's own settings, which DeepSpeed reads, or is refused with the key that helps."""

from __future__ import annotations

import pytest

from actors.training.offload import Offload
from actors.training.settings import deepspeed_settings
from model.errors import UserError
from tests.actors.training.test_train_settings import settings


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
