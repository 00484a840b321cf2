"""Wherever a run is killed, it goes on to the losses, batches and weights of the run that nothing befell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.training.rows import RowFormat, micro_steps
from tests.packed import counting_rows, write_rows
from tests.training_runs import FORM, LEARNING_RATE, MASK, MICRO_ROWS, ROWS_PER_STEP, read_metrics, timeless

pytestmark = [pytest.mark.faults, pytest.mark.slow]
STEPS = 12
KILLED = -signal.SIGKILL

# (point, the how-manieth time in its process, newest checkpoint then, only at length). Checkpoints come every 3 steps,
# a step has 5 of 12 rows in 3 micro-steps: epochs end inside the steps 3, 5, 8 and 10.
KILLS = [
    ("micro_step", 5, 0, True),  # in step 2, of epoch 1: nothing was kept yet
    ("between shards", 1, 0, False),  # in the checkpoint of step 3
    ("before the marker", 1, 0, True),
    ("before the name", 1, 0, False),
    ("after the name", 1, 3, False),
    ("metrics", 2, 3, False),  # between a step's line and the checkpoint: step 5, whose rows are of two epochs
    ("micro_step", 10, 6, False),  # in step 7: epoch 3
    ("marker of an old one gone", 1, 9, False),  # in the removal of the checkpoint of step 3
    ("before the model", 1, 12, True),
]
FORWARDS = {workers: micro_steps(ROWS_PER_STEP, workers, MICRO_ROWS) for workers in (1, 2)}
RESIZES = [
    {"workers": 1, "kill": ["micro_step", 4 * FORWARDS[1] + 1]},  # in step 5
    {"workers": 2, "kill": ["micro_step", 4 * FORWARDS[2] + 1]},  # from 3, in step 8
    {"workers": 1},  # from 6
]

LORA = {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}
# What else another number of workers must not change. Settings; whether at length only.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "stage 0": ({"zero_stage": 0}, True),
    "stage 1": ({"zero_stage": 1}, False),
    "stage 2": ({"zero_stage": 2}, True),
    "stage 1 bfloat16": ({"zero_stage": 1, "dtype": "bfloat16"}, True),
    "adapter": ({"lora": LORA}, False),
    "adapter stage 1": ({"lora": LORA, "zero_stage": 1}, True),
    "adapter stage 0": ({"lora": LORA, "zero_stage": 0}, True),
}
SHORT = {"steps": 6, "checkpoint_every": 2}
SHORT_RESIZES = [
    {"workers": 1, "kill": ["micro_step", 2 * FORWARDS[1] + 1]},  # in step 3
    {"workers": 2, "kill": ["micro_step", 2 * FORWARDS[2] + 1]},  # from 2, in step 5
    {"workers": 1},  # from 4
]

# Two towers, with larger blocks first, evaluations and samples. Settings; whether at length only.
TOWERS: dict[str, tuple[dict[str, Any], bool]] = {
    "clone": ({"two_tower": {"block_size": 4, "first_block_size": 8, "first_steps": 3}}, False),
    "adapter of two towers": ({"two_tower": {"block_size": 4, "denoiser": "lora"}, "lora": LORA}, True),
}
TOWER_KILLS = [
    {"workers": 1, "kill": ["micro_step", 2 * FORWARDS[1] + 2]},  # in the middle of step 3
    {"workers": 1, "kill": ["metrics", 2]},  # from 2, when the line of step 4 is there and its checkpoint is not
    {"workers": 1, "kill": ["before the name", 1]},  # from 2, in that checkpoint
    {"workers": 1},
]

UPLOADS = [
    {"workers": 1, "kill": ["between uploads", 2]},  # of the checkpoint of step 3
    {"workers": 1, "kill": ["before the marker", 2]},  # the checkpoint of step 6 is there, but for its marker
    {"workers": 1},
]
OBJECT_STORE = "dir::file://"  # which the job takes for one: it is not a plain local filesystem


@dataclass(frozen=True)
class Played:
    """The runs on one output: how each of them ended."""

    output: Path
    ends: list[dict[str, Any]]
    errors: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.output)

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "samples.jsonl").read_text().splitlines()]


def kills(at_length: bool) -> list[tuple[str, int, int]]:
    return [(point, count, newest) for point, count, newest, long in KILLS if at_length or not long]


def kinds(at_length: bool) -> dict[str, dict[str, Any]]:
    return {name: settings for name, (settings, long) in KINDS.items() if at_length or not long}


def short_plans(at_length: bool, adapted: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """For each kind a whole run, and one from one worker to two and back. adapted: a model that has a mask token, which
    an adapter needs, and rows for it."""
    plans: dict[str, list[dict[str, Any]]] = {}
    for name, settings in kinds(at_length).items():
        told = {"settings": {**SHORT, **(adapted if "lora" in settings else {}), **settings}}
        plans[f"{name}, whole"] = [{"workers": 1, **told}]
        plans[f"{name}, resized"] = [{**run, **told} for run in SHORT_RESIZES]
    return plans


def tower_plans(at_length: bool, held_out: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each kind of denoiser a whole run, and one that is killed three times."""
    evaluation = {"every": 3, "rows": str(held_out), "most_rows": 2, "samples": 2, "sample_tokens": 8}
    plans: dict[str, list[dict[str, Any]]] = {}
    for name in towers(at_length):
        told = {"settings": {**SHORT, "objective": "two_tower", "evaluation": evaluation, **TOWERS[name][0]}}
        plans[f"{name}, whole"] = [{"workers": 1, **told}]
        plans[f"{name}, killed"] = [{**run, **told} for run in TOWER_KILLS]
    return plans


def towers(at_length: bool) -> list[str]:
    return [name for name, (_, long) in TOWERS.items() if at_length or not long]


@pytest.fixture(scope="module")
def played(
    project: Path,
    at_length: bool,
    tiny_model: Path,
    tiny_adapted_model: Path,
    training_rows: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Played]:
    """All runs of this file, in one process with its forks, by name."""
    folder = tmp_path_factory.mktemp("kills")
    mask = 3  # of tiny_adapted_model
    rows = write_rows(folder / "rows", counting_rows(12, mask_token_id=mask), RowFormat(8, 48, mask))
    adapted = {"model": str(tiny_adapted_model), "rows": str(rows)}
    plans: dict[str, list[dict[str, Any]]] = {
        "whole": [{"workers": 1}],
        "killed": [{"workers": 1, "kill": [point, count]} for point, count, _ in kills(at_length)] + [{"workers": 1}],
        "resized": RESIZES,
        "uploaded": UPLOADS,
        **short_plans(at_length, adapted),
        **tower_plans(at_length, write_rows(folder / "held_out", counting_rows(4, mask_token_id=MASK), FORM)),
    }
    scheme = {"uploaded": OBJECT_STORE}
    told = {
        "model": str(tiny_model), "rows": str(training_rows), "steps": STEPS, "rows_per_step": ROWS_PER_STEP,
        "micro_rows": MICRO_ROWS, "learning_rate": LEARNING_RATE, "warmup_steps": 5, "weight_decay": 0.1,
        "dtype": "float32", "checkpoint_every": 3,
    }  # fmt: skip
    outputs = {name: scheme.get(name, "") + str(folder / name) for name in plans}
    runs = [{"output": outputs[name], **run} for name, plan in plans.items() for run in plan]
    place = folder / "plan.json"
    place.write_text(json.dumps({"settings": told, "runs": runs}))
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.kill_points", str(place)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=290 if not at_length else 900)
    ends = iter([json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"codes"')])
    assert done.returncode == 0, done.stderr
    places = {name: folder / name for name in plans}
    places["uploaded"] = Path(f"{folder}/uploaded/{folder}/uploaded")  # that filesystem counts from its own root
    return {name: Played(places[name], [next(ends) for _ in plan], done.stderr) for name, plan in plans.items()}


def test_a_run_killed_at_every_kind_of_moment_ends_as_if_nothing_had_happened(
    played: dict[str, Played], at_length: bool
) -> None:
    whole, killed = played["whole"], played["killed"]
    for (point, count, newest), end in zip(kills(at_length), killed.ends, strict=False):
        assert (end["codes"], end["newest"]) == ([KILLED], newest), (point, count, killed.errors)
    assert killed.ends[-1]["codes"] == whole.ends[0]["codes"] == [0], killed.errors
    assert timeless(killed.metrics) == timeless(whole.metrics)
    assert [line["step"] for line in killed.metrics] == list(range(1, STEPS + 1))
    weights = [(one.output / "model" / "model.safetensors").read_bytes() for one in (killed, whole)]
    assert weights[0] == weights[1]


def test_another_number_of_workers_goes_on_with_the_same_batches_and_losses(played: dict[str, Played]) -> None:
    """From one worker to two and back to one, each time after a kill between checkpoints."""
    whole, resized = played["whole"], played["resized"]
    assert [end["newest"] for end in resized.ends] == [3, 6, STEPS], resized.errors
    assert resized.ends[-1]["codes"] == [0], resized.errors
    for key in ("step", "batch_hash", "supervised_tokens", "learning_rate"):
        assert [line[key] for line in resized.metrics] == [line[key] for line in whole.metrics]
    expected = [line["loss"] for line in whole.metrics]
    assert [line["loss"] for line in resized.metrics] == pytest.approx(expected, abs=1e-3)
    assert [line["grad_norm"] for line in resized.metrics] == pytest.approx(
        [line["grad_norm"] for line in whole.metrics], rel=1e-2
    )
    assert sorted(path.name for path in (resized.output / "checkpoints").iterdir()) == ["step_12", "step_9"]


def test_another_number_of_workers_goes_on_at_every_stage_and_with_an_adapter(
    played: dict[str, Played], at_length: bool
) -> None:
    for name in kinds(at_length):
        whole, resized = played[f"{name}, whole"], played[f"{name}, resized"]
        assert [end["newest"] for end in resized.ends] == [2, 4, 6], (name, resized.errors)
        assert whole.ends[-1]["codes"] == resized.ends[-1]["codes"] == [0], (name, resized.errors)
        for key in ("step", "batch_hash", "supervised_tokens", "learning_rate"):
            assert [line[key] for line in resized.metrics] == [line[key] for line in whole.metrics], name
        expected = [line["loss"] for line in whole.metrics]
        # In bfloat16 each micro-batch rounds its gradient, and two workers make other micro-batches: one worker whole,
        # with one row a micro-batch instead of two, ended 2.3e-4 away from itself too.
        near = pytest.approx(expected, rel=1e-3) if "bfloat16" in name else pytest.approx(expected, abs=1e-5)
        assert [line["loss"] for line in resized.metrics] == near, name
        if "adapter" in name:
            written = [load_file(one.output / "adapter" / "adapter_model.safetensors") for one in (resized, whole)]
            for key, tensor in written[1].items():
                torch.testing.assert_close(written[0][key], tensor, rtol=1e-3, atol=1e-5)


def test_a_run_killed_while_it_uploads_goes_on_from_the_checkpoint_that_has_its_marker(
    played: dict[str, Played],
) -> None:
    whole, uploaded = played["whole"], played["uploaded"]
    assert [end["newest"] for end in uploaded.ends] == [0, 3, STEPS], uploaded.errors
    assert uploaded.ends[-1]["codes"] == [0], uploaded.errors
    assert timeless(uploaded.metrics) == timeless(whole.metrics)
    assert sorted(path.name for path in (uploaded.output / "checkpoints").iterdir()) == ["step_12", "step_9"]


def test_two_towers_that_are_killed_go_on_to_the_same_losses_samples_and_weights(
    played: dict[str, Played], at_length: bool
) -> None:
    for name in towers(at_length):
        whole, killed = played[f"{name}, whole"], played[f"{name}, killed"]
        ends = [(end["codes"], end["newest"]) for end in killed.ends]
        assert ends == [([KILLED], 2), ([KILLED], 2), ([KILLED], 2), ([0], 6)], (name, killed.errors)
        assert timeless(killed.metrics) == timeless(whole.metrics)
        assert sum("held_out_bound" in line for line in whole.metrics) == 2
        assert [line["step"] for line in whole.samples] == [3, 3, 6, 6]
        assert timeless(killed.samples) == timeless(whole.samples)
        files = [contents(one.output / "model") for one in (killed, whole)]
        assert files[0] == files[1] and f"context{os.sep}model.safetensors" in files[0]


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
