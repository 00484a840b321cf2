"""cluster.yaml and the recipes: what Ray's own schema code accepts, and what the job line does there."""

from __future__ import annotations

import copy
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from actors.serve_local import SERVE_SETTINGS
from pipelines.adapt import AdaptConfig, plan, run
from pipelines.jobkit import main
from pipelines.jobkit.cli import load_config, parse_arguments

RECIPES = {
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B-Instruct", 6000, 2e-5),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", 2500, 1e-5),
}


@pytest.fixture(scope="module")
def cluster(project: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((project / "cluster.yaml").read_text())
    return content


def test_rays_own_code_accepts_the_cluster(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))


def test_rays_own_code_would_refuse_a_misspelt_key(cluster: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout_mins"):
        validate_config(prepare_config({**copy.deepcopy(cluster), "idle_timeout_mins": 5}))


def test_eight_workers_of_eight_gpus_are_started_at_once(cluster: dict[str, Any]) -> None:
    prepared = prepare_config(copy.deepcopy(cluster))
    workers = [kind for name, kind in prepared["available_node_types"].items() if name != prepared["head_node_type"]]
    assert [(kind["min_workers"], kind["max_workers"], kind["resources"]["GPU"]) for kind in workers] == [(8, 8, 8)]
    assert prepared["max_workers"] == 8
    assert "GPU" not in prepared["available_node_types"][prepared["head_node_type"]]["resources"]


def test_every_node_gets_the_checkout_and_installs_it_editable_with_the_pinned_set(cluster: dict[str, Any]) -> None:
    assert cluster["file_mounts"]["~/blockcast"] == "."
    install = [command for command in cluster["setup_commands"] if "pip install" in command]
    assert len(install) == 1
    assert re.search(r"cd ~/blockcast &&.* --editable '\.\[aws\]' --constraint constraints\.txt$", install[0])


def run_start_command(command: str, project: Path, folder: Path) -> dict[str, str]:
    """Run a start command in a home where `ray` writes down its directory, its arguments and its environment."""
    (folder / "bin").mkdir()
    (folder / "blockcast").symlink_to(project)
    recorder = folder / "bin" / "ray"
    recorder.write_text(
        '#!/bin/sh\nset -e\npwd -P > "$HOME/cwd"\necho "$@" > "$HOME/arguments"\nenv > "$HOME/environment"\n'
    )
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    environment = {
        "HOME": str(folder),
        "PATH": f"{recorder.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_HEAD_IP": "10.0.0.1",
    }
    subprocess.run(["bash", "-c", command], env=environment, check=True)
    seen = dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines() if "=" in line)
    return {
        **seen,
        "cwd": (folder / "cwd").read_text().strip(),
        "arguments": (folder / "arguments").read_text().strip(),
    }


@pytest.mark.parametrize(
    ("which", "arguments"),
    [
        ("head_start_ray_commands", "start --head --port=6379"),
        ("worker_start_ray_commands", "start --address=10.0.0.1:6379"),
    ],
)
def test_every_ray_starts_in_the_checkout_with_recipe_storage_threads_and_token(
    cluster: dict[str, Any], project: Path, tmp_path: Path, which: str, arguments: str
) -> None:
    seen = run_start_command(cluster[which][-1], project, tmp_path)
    assert seen["arguments"].startswith(arguments)
    assert seen["cwd"] == str(project)
    assert Path(seen["BLOCKCAST_CONFIG"]).resolve() == project / "deploy" / "recipes" / "qwen2.5-1.5b.yaml"
    assert seen["BLOCKCAST_STORAGE"].startswith("s3://")
    assert seen["OMP_NUM_THREADS"] == "8"
    assert seen["RAY_AUTH_MODE"] == "token"
    assert SERVE_SETTINGS.items() <= seen.items()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_published_one_on_the_clusters_64_gpus(project: Path, name: str) -> None:
    file = str(project / "deploy" / "recipes" / f"{name}.yaml")
    config = load_config("adapt", AdaptConfig, parse_arguments(["--config", file]))
    model, steps, learning_rate = RECIPES[name]
    assert (config.model, config.train.steps, config.train.learning_rate) == (model, steps, learning_rate)
    assert config.train.rows_per_step * config.pack.context_length == 524_288
    assert (config.pack.block_size, config.pack.context_length, config.train.warmup_steps) == (32, 2048, 500)
    assert (config.train.workers, config.train.device, config.objective) == (64, "gpu", "block_diffusion")
    assert config.train.rows_per_step % (config.train.workers * config.train.micro_rows) == 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_dry_run_prints_plan_and_deepspeed_settings(
    project: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKCAST_CONFIG", str(project / "deploy" / "recipes" / f"{name}.yaml"))
    monkeypatch.chdir(tmp_path)
    assert main("adapt", AdaptConfig, run, plan, argv=["--dry-run"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["config"]["model"] == RECIPES[name][0]
    assert document["plan"]["workers"] == "64 workers of 1 GPU and 8 CPUs each"
    settings = document["plan"]["deepspeed"]
    assert settings["zero_optimization"]["stage"] == 3
    assert settings["bf16"] == {"enabled": True}
    assert settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"] * 64 == 256
    assert list(tmp_path.iterdir()) == []
