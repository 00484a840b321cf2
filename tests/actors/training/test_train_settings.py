"""The learning rate is a function of the step; DeepSpeed is told the ZeRO stage, with float32 accumulation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from actors.training.checkpoints import Identity
from actors.training.settings import TrainSettings, deepspeed_settings
from model.errors import UserError


def settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model": "m", "rows": "r", "output": "o", "identity": Identity("i"), "objective": "block_diffusion", "seed": 0,
        "device": "cpu", "workers": 1, "threads": 1, "steps": 100, "rows_per_step": 8, "micro_rows": 2,
        "learning_rate": 1.0, "warmup_steps": 10, "schedule": "cosine", "final_share": 0.1, "weight_decay": 0.0,
        "beta2": 0.95, "clip": 1.0, "dtype": "bfloat16", "document_mask": True, "activation_checkpointing": False,
        "checkpoint_every": 10, "keep_checkpoints": 2,
    }  # fmt: skip
    return TrainSettings(**{**values, **changes})


def test_the_rate_rises_linearly_and_falls_to_its_final_share() -> None:
    rates = [settings().learning_rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))


def test_a_constant_schedule_stays_up() -> None:
    constant = settings(schedule="constant", warmup_steps=0)
    assert {constant.learning_rate_at(step) for step in range(100)} == {1.0}


def test_wsd_stays_up_and_then_falls_in_a_straight_line() -> None:
    told = settings(schedule="wsd", decay_share=0.25)
    rates = [told.learning_rate_at(step) for step in range(101)]
    assert set(rates[10:76]) == {1.0}
    assert rates[76] < 1.0
    assert rates[88] == pytest.approx(1 - 0.9 * 13 / 25)
    assert rates[100] == pytest.approx(0.1)
    assert settings(schedule="wsd", decay_share=0.0).learning_rate_at(99) == 1.0
    all_of_it = settings(schedule="wsd", decay_share=1.0)
    assert all_of_it.learning_rate_at(9) == 1.0 and all_of_it.learning_rate_at(55) == pytest.approx(0.55)


def test_a_warm_up_longer_than_the_run_is_no_error() -> None:
    assert settings(steps=5, warmup_steps=10).learning_rate_at(4) == pytest.approx(0.5)


def test_accumulation_follows_from_the_global_batch() -> None:
    told = deepspeed_settings(settings(workers=3, rows_per_step=10, micro_rows=2))
    assert told["gradient_accumulation_steps"] == 2
    assert told["zero_optimization"]["stage"] == 3
    assert told["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_without_zero_does_bfloat16_accumulate_in_bfloat16(stage: int) -> None:
    told = deepspeed_settings(settings(zero_stage=stage))
    assert told["zero_optimization"]["stage"] == stage
    assert told["data_types"] == {"grad_accum_dtype": "fp32" if stage else "bf16"}
    in_float32 = deepspeed_settings(settings(zero_stage=stage, dtype="float32"))
    assert in_float32["data_types"] == {"grad_accum_dtype": "fp32"}


def test_options_of_another_objective_are_refused_with_the_settings() -> None:
    with pytest.raises(UserError, match="belong to block_diffusion"):
        settings(objective="next_token", ar_loss_weight=0.5).check()
    with pytest.raises(UserError, match="document_mask"):
        settings(document_padding=False).check()
    settings(document_padding=False, document_mask=False, complementary_masks=False).check()


def test_only_a_lone_worker_keeps_parameters_whole() -> None:
    assert "stage3_param_persistence_threshold" in deepspeed_settings(settings())["zero_optimization"]
    assert "stage3_param_persistence_threshold" not in deepspeed_settings(settings(workers=2))["zero_optimization"]
