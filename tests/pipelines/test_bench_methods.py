"""bench methods: every method answers the same tasks beside the AR control, and what its training took is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from model.backbone import load_backbone
from model.two_tower.folder import load_two_tower, make_two_tower, save_two_tower
from pipelines.assessment.measuring import Settings
from pipelines.benches.methods.config import MethodsBenchConfig
from pipelines.benches.methods.cost import training_cost
from pipelines.benches.methods.memory import memory_of
from pipelines.benches.methods.run import contenders_of, find_models, speed_ratio
from tests.hybrid import write_hybrid
from tests.pipelines.test_bench import bench

SMALL = ["--tasks", 10, "--max_tokens", 20, "--dtype", "float64", "--memory", "false"]


@pytest.fixture(scope="module")
def two_tower(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "two_tower"
    save_two_tower(make_two_tower(load_backbone(tiny_model), block_size=8), folder, context=True)
    return folder


@pytest.fixture(scope="module")
def measured(
    tiny_model: Path, tiny_adapted_model: Path, two_tower: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("bench") / "methods.json"
    models = ["--control", tiny_model, "--fast_dllm_v2", tiny_adapted_model, "--two_tower", two_tower]
    return bench("methods", output, *models, *SMALL, "--gammas", 0.8, 0.01)


def lines(content: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    return {line["decoder"]: line for line in content["table"] if line["part"] == part}


def test_every_model_competes_in_every_mode(measured: dict[str, Any]) -> None:
    assert list(lines(measured, "decoding")) == [
        "control, AR",
        "Fast-dLLM v2, AR",
        "Fast-dLLM v2, blocks 0.9",
        "Fast-dLLM v2, lossless",
        "TwoTower, AR",
        "TwoTower, blocks 0.8",
        "TwoTower, blocks 0.01",
        "TwoTower, lossless",
    ]
    assert list(lines(measured, "training")) == ["control", "Fast-dLLM v2", "TwoTower"]


def test_lossless_mode_and_a_frozen_reader_change_no_answer(measured: dict[str, Any]) -> None:
    table = lines(measured, "decoding")
    for name, line in table.items():
        if name.endswith(("AR", "lossless")):
            assert line["equal to its AR"] == 1, name
    assert table["TwoTower, AR"]["per forward"] == table["control, AR"]["per forward"]
    assert table["TwoTower, blocks 0.01"]["per forward"] > table["TwoTower, AR"]["per forward"]


def test_a_ratio_is_taken_within_a_turn() -> None:
    def turn(tokens: int, seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "answers": [{"usage": {"completion_tokens": tokens}}]}

    mine, others = [turn(10, 1), turn(10, 10), turn(30, 1)], [turn(5, 1), turn(5, 10), turn(10, 1)]
    assert speed_ratio(mine, others) == 2  # of 2, 2 and 3; the slow turn was slow for both


def test_the_cost_is_that_of_the_run_the_model_lies_in(tiny_model: Path, two_tower: Path, tmp_path: Path) -> None:
    assert training_cost(tiny_model) is None
    run = tmp_path / "run"
    shutil.copytree(two_tower, run / "model")
    line = {"seconds": 2.0, "tokens_per_second": 50.0, "supervised_tokens": 40}
    (run / "metrics.jsonl").write_text(3 * (json.dumps(line) + "\n"))
    config = {"objective": "two_tower", "train": {"rows_per_step": 1}, "pack": {"context_length": 8}}
    (run / "manifest.json").write_text(json.dumps({"job": "adapt", "config": config, "wall_time_s": 9.0}))
    cost = training_cost(run / "model")
    assert cost is not None
    assert (cost.objective, cost.steps, cost.tokens, cost.supervised, cost.seconds) == ("two_tower", 3, 300, 120, 6.0)
    denoiser = load_two_tower(two_tower).towers.writer()  # with its time conditioning, without the context tower
    assert cost.parameters == sum(p.numel() for p in denoiser.parameters())


@pytest.mark.slow
def test_a_hybrid_is_compared_like_any_other_model(tmp_path: Path) -> None:
    control, towers = write_hybrid(tmp_path / "hybrid"), tmp_path / "towers"
    save_two_tower(make_two_tower(load_backbone(control), block_size=4), towers, context=True)
    words = ["--control", control, "--two_tower", towers, *SMALL]
    table = lines(bench("methods", tmp_path / "methods.json", *words), "decoding")
    assert table["TwoTower, lossless"]["equal to its AR"] == 1
    assert table["TwoTower, AR"]["equal to its AR"] == 1


@pytest.mark.slow
def test_memory_is_that_of_a_process_with_this_contender_alone(tiny_model: Path, two_tower: Path) -> None:
    config = MethodsBenchConfig(control=str(tiny_model), two_tower=str(two_tower))
    contender = contenders_of(find_models(config)[1], config)[1]
    found = memory_of(contender, Settings("float32", "cpu", 1, 0), tasks=1, max_tokens=2)
    assert 0 < found.loaded <= found.peak < 2**30


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "takes no --model but --control"),
        (["--control", "MODEL"], "Nothing to compare with --control"),
        (["--control", "MODEL", "--two_tower", "MODEL"], "was not adapted to write blocks: give it as --base"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], sentence: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.bench import start

    given = [str(tiny_model) if word == "MODEL" else word for word in words]
    assert start(["methods", "--output", str(tmp_path / "x.json"), *given]) == 2
    assert sentence in capsys.readouterr().err
