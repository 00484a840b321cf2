"""Workers are placed as asked or not at all; lost workers are tried again within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.training.clock import OTHER, PHASES
from model.errors import JobError, UserError
from pipelines.training.curve import draw_curves, running_mean
from pipelines.training.launch import persist
from pipelines.training.resources import Cluster, Placement, _provider_of, joined, number_format, place_workers
from pipelines.training.section import TrainSection
from pipelines.training.watch import WorkersLeft

LAPTOP = Cluster(ours=True, alone=True, cloud=False, cpus=(2.0,), gpus=(0.0,))
WORKSTATION = Cluster(ours=True, alone=True, cloud=False, cpus=(32.0,), gpus=(4.0,))
HEAD = Cluster(ours=False, alone=True, cloud=False, cpus=(2.0,), gpus=(0.0,))
CLOUD_HEAD = Cluster(ours=False, alone=False, cloud=True, cpus=(16.0,), gpus=(0.0,))
CLUSTER = Cluster(ours=False, alone=False, cloud=True, cpus=(16.0, *(96.0,) * 8), gpus=(0.0, *(8.0,) * 8))


@pytest.fixture(autouse=True)
def no_thread_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def placed(cluster: Cluster, **train: Any) -> Placement:
    return place_workers(TrainSection(**train), cluster)


def test_a_machine_without_gpu_gets_one_worker_that_owns_its_cpus() -> None:
    assert placed(LAPTOP) == Placement(workers=1, device="cpu", cpus=2.0, threads=2)


def test_a_machine_with_gpus_gets_a_worker_for_each() -> None:
    assert placed(WORKSTATION) == Placement(workers=4, device="cuda", cpus=8.0, threads=8)


def test_more_workers_than_cpus_share_them_on_our_own_ray_only() -> None:
    assert placed(LAPTOP, workers=4) == Placement(4, "cpu", 0.5, 1)
    assert placed(HEAD, workers=4) == Placement(4, "cpu", 1.0, 1)


def test_a_lone_head_counts_as_this_machine() -> None:
    assert placed(HEAD) == Placement(1, "cpu", 2.0, 2)


def test_a_cluster_must_be_told_how_many_workers() -> None:
    with pytest.raises(UserError, match=r"--train\.workers auto is for a Ray on this machine only"):
        placed(CLUSTER)
    assert placed(CLUSTER, workers=64, device="gpu", cpus_per_worker=10) == Placement(64, "cuda", 10.0, 10)


def test_a_cluster_whose_gpus_have_not_joined_never_falls_back_to_the_heads_cpu() -> None:
    with pytest.raises(UserError, match="may still get GPUs"):
        placed(CLOUD_HEAD, workers=64)
    asked = placed(CLOUD_HEAD, workers=64, device="gpu")
    assert asked.bundle == {"CPU": 1.0, "GPU": 1.0}
    assert joined(asked, [{"CPU": 16.0}]) == 0


def test_the_user_may_limit_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert placed(LAPTOP).threads == 1


def test_have_counts_the_workers_that_the_joined_nodes_hold() -> None:
    nodes = [{"CPU": 16.0}, {"CPU": 96.0, "GPU": 8.0}, {"CPU": 4.0, "GPU": 8.0}]
    assert joined(Placement(64, "cuda", 1.0, 1), nodes) == 12
    assert joined(Placement(3, "cuda", 1.0, 1), nodes) == 3


def test_the_autoscalers_provider_is_read_from_its_config(tmp_path: Path) -> None:
    path = tmp_path / "bootstrap.yaml"
    path.write_text("provider:\n  type: aws\n")
    assert (_provider_of(path), _provider_of(tmp_path / "absent.yaml")) == ("aws", "unknown")


class Script:
    """Attempts that end as told: the steps committed when each of them failed, then success."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.committed, self.attempts = list(steps), 0, 0

    def attempt(self) -> Exception | None:
        self.attempts += 1
        if not self.steps:
            return None
        self.committed = self.steps.pop(0)
        return RuntimeError("a worker died")


def test_lost_workers_are_started_again_as_long_as_there_is_progress() -> None:
    script = Script(5, 10, 15, 20)
    persist(script.attempt, lambda: script.committed, max_failures=1)
    assert script.attempts == 5


def test_failures_without_progress_end_the_job() -> None:
    script = Script(5, 5, 5, 5)
    with pytest.raises(JobError, match="Training failed 3 times in a row after step 5"):
        persist(script.attempt, lambda: script.committed, max_failures=2)
    assert script.attempts == 3


def test_a_node_that_is_taken_away_is_no_failure_and_a_hung_worker_is() -> None:
    left: list[Exception | None] = [WorkersLeft("drained", counts=False)] * 3 + [None]
    persist(lambda: left.pop(0), lambda: 5 - len(left), max_failures=0)
    with pytest.raises(JobError, match="Training failed 1 times"):
        persist(lambda: WorkersLeft("drained, and nothing was saved", counts=False), lambda: 5, max_failures=0)
    with pytest.raises(JobError, match="Training failed 1 times"):
        persist(lambda: WorkersLeft("hung", counts=True), lambda: 5, max_failures=0)


def test_the_curves_are_a_picture_whatever_the_lines_hold(tmp_path: Path) -> None:
    plain = [{"step": n, "loss": 3.0 / n, "learning_rate": 1e-3, "grad_norm": 1.0} for n in range(1, 30)]
    shares = dict.fromkeys((*PHASES, OTHER), 1 / 6)
    more = {"loss_by_noise": [1.0, None, 2.0, 3.0, 4.0], "time_shares": shares, "ar_loss": 2.5}
    full = [{**line, **more, **({"held_out_loss": 2.0} if line["step"] % 7 == 0 else {})} for line in plain]
    for records in (plain, full, plain[:3] + full[3:], full[:1]):
        draw_curves(records, "a run", tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_running_mean_starts_at_the_first_loss_and_stays_inside() -> None:
    losses = np.array([4.0, 2.0, 3.0])
    smooth = running_mean(losses)
    assert smooth[0] == pytest.approx(4.0)
    assert losses.min() < smooth[-1] < losses.max()


@pytest.mark.parametrize(
    ("asked", "device", "multiplies", "expected"),
    [
        ("auto", "cuda", False, "bfloat16"),
        ("auto", "cpu", True, "bfloat16"),
        ("auto", "cpu", False, "float32"),
        ("bfloat16", "cpu", False, "bfloat16"),
        ("float32", "cuda", True, "float32"),
    ],
)
def test_the_number_format_is_what_the_hardware_multiplies_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch, asked: str, device: str, multiplies: bool, expected: str
) -> None:
    monkeypatch.setattr("pipelines.training.resources.cpu_multiplies_bfloat16", lambda: multiplies)
    assert number_format(TrainSection.model_validate({"dtype": asked}), device) == expected
