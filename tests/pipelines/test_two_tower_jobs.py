"""generate, assess and export with a TwoTower folder: modes by name, figures, one sentence for what cannot be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from model.errors import UserError
from model.two_tower.adapter import default_settings
from model.two_tower.decoding import TowerRequest, write_blocks, write_tokens
from model.two_tower.folder import load_two_tower, read_two_tower_config, save_config
from pipelines.assess import AssessConfig
from pipelines.assess import plan as assess_plan
from pipelines.assess import run as assess_run
from pipelines.export import ExportConfig
from pipelines.export import run as export_run
from pipelines.generate import GenerateConfig, plan, run
from pipelines.jobkit import main
from pipelines.jobkit.cli import load_config, parse_arguments
from tests.towers import build_tower_folder

IDS = [40, 41, 42, 43, 44]
PROMPTS: list[dict[str, Any]] = [
    {"id": "default", "prompt_token_ids": IDS, "max_tokens": 20},
    {"id": "ar", "prompt_token_ids": IDS, "max_tokens": 20, "diffusion": {"mode": "ar"}},
    {"id": "lossless", "prompt_token_ids": IDS, "max_tokens": 20, "diffusion": {"mode": "lossless"}},
]


def generate(model: Path, tmp_path: Path, *words: str, prompts: list[dict[str, Any]] = PROMPTS) -> list[Any]:
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    output = tmp_path / "answers.jsonl"
    arguments = ["--model", str(model), "--prompts", str(source), "--output", str(output), *words]
    run(load_config("generate", GenerateConfig, parse_arguments(arguments)))
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_generate_writes_algorithm_1_s_answers_by_default_and_other_modes_where_asked(
    tower_folder: Path, tmp_path: Path
) -> None:
    blocks, ar, lossless = generate(tower_folder, tmp_path)
    towers = load_two_tower(tower_folder)
    stops = towers.context.stop_token_ids
    (published,), (tokens,) = (
        writer(towers.towers, [TowerRequest(tuple(IDS), 20, stop_token_ids=stops)])
        for writer in (write_blocks, write_tokens)
    )
    assert tuple(blocks["token_ids"]) == published.token_ids
    assert tuple(ar["token_ids"]) == tuple(lossless["token_ids"]) == tokens.token_ids
    figures = blocks["diffusion"]
    assert figures["mode"] == "diffusion"
    assert figures["forwards"]["commit"] == published.forwards["commit"]
    assert sum(figures["steps_per_block"]) == figures["forwards"]["denoise"] <= published.forwards["denoise"]
    spent = figures["forwards"]["denoise"] + figures["forwards"]["commit"]
    assert figures["tokens_per_forward"] == len(blocks["token_ids"]) / spent
    assert lossless["diffusion"]["drafted_tokens"] >= lossless["diffusion"]["accepted_tokens"]


def test_assess_compares_a_tower_folder_with_its_own_ar_mode(tower_folder: Path, tmp_path: Path) -> None:
    words = ["--model", str(tower_folder), "--output", str(tmp_path / "out"), "--max_tokens", "10"]
    small = ["--tasks.count", "4", "--held_out.tasks", "4", "--engine.max_rows", "2"]
    assert main("assess", AssessConfig, assess_run, assess_plan, argv=[*words, *small]) == 0
    figures = json.loads((tmp_path / "out" / "manifest.json").read_text())["figures"]
    assert [one["contender"] for one in figures["contenders"]] == ["adapted, AR", "adapted, blocks budgeted"]
    losses = figures["held_out"]["adapted"]
    assert all(0 < losses[name] < 20 for name in ("masked", "bound", "next_token"))
    lossless = [
        *words[:3],
        str(tmp_path / "lossless"),
        *words[4:],
        "--decode.mode",
        "lossless",
        "--held_out.tasks",
        "0",
    ]
    assert main("assess", AssessConfig, assess_run, assess_plan, argv=[*lossless, "--tasks.count", "4"]) == 0
    answers: dict[str, list[Any]] = {}
    for line in (tmp_path / "lossless" / "answers.jsonl").read_text().splitlines():
        answers.setdefault(json.loads(line)["contender"], []).append(json.loads(line)["token_ids"])
    assert answers["adapted, AR"] == answers["adapted, lossless"]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("denoiser", (), "lacks the folder denoiser: copy the model again, or set decode.mode ar"),
        ("denoiser", ("--decode.mode", "lossless"), "lacks the folder denoiser"),
        ("time_conditioning.safetensors", (), "lacks time_conditioning.safetensors: copy the model again"),
        ("context", (), "lacks the folder context, which two_tower.json says it holds"),
        (None, ("--decode.threshold", "0.5"), "threshold 0.5 has no effect with policy 'budgeted'"),
        (None, ("--decode.refresh", "sub_block"), "decode.refresh sub_block has no effect on a TwoTower model"),
        (None, ("--decode.sub_block_size", "4"), "decode.sub_block_size 4 has no effect on a TwoTower model"),
    ],
)
def test_a_folder_that_lacks_something_or_cannot_do_it_is_one_sentence(
    tower_folder: Path,
    tmp_path: Path,
    name: str | None,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(tower_folder, tmp_path / "towers"))
    if name is not None:
        place = folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "max_tokens": 3}\n')
    argv = ["--model", str(folder), "--prompts", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "a.jsonl")]
    assert main("generate", GenerateConfig, run, plan, argv=[*argv, *words]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert not (tmp_path / "a.jsonl").exists()


def test_ar_mode_reads_with_the_context_tower_alone(tower_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tower_folder, tmp_path / "towers"))
    shutil.rmtree(folder / "denoiser")
    (answer,) = generate(folder, tmp_path, "--decode.mode", "ar", prompts=PROMPTS[:1])
    (whole,) = generate(tower_folder, tmp_path / "towers", "--decode.mode", "ar", prompts=PROMPTS[:1])
    assert answer == whole and answer["diffusion"]["mode"] == "ar"


def export(model: Path, output: Path, *words: str) -> dict[str, Any]:
    arguments = ["--model", str(model), "--output", str(output), *words]
    return export_run(load_config("export", ExportConfig, parse_arguments(arguments)))


def test_an_exported_folder_of_two_towers_needs_no_other_and_its_towers_are_ordinary_models(
    tower_folder: Path, tmp_path: Path
) -> None:
    """From one that only names its context tower."""
    named = Path(shutil.copytree(tower_folder, tmp_path / "named", ignore=shutil.ignore_patterns("context")))
    config = read_two_tower_config(named)
    save_config(replace(config, context=str(tower_folder / "context")), named)
    figures = export(named, tmp_path / "out", "--verify", "false")
    assert figures["denoiser"] == "clone" and list(figures["towers"]) == ["context", "denoiser"]
    assert generate(tmp_path / "out", tmp_path) == generate(tower_folder, tmp_path / "out")
    for name in ("context", "denoiser"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name)
        weights = load_file(tower_folder / name / "model.safetensors")
        assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in weights.items())
        assert figures["towers"][name]["class"] == type(model).__name__ == "LlamaForCausalLM"
    with pytest.raises(UserError, match="--format fast_dllm_v2 is for one network"):
        export(named, tmp_path / "other", "--format", "fast_dllm_v2")
    save_config(replace(config, context=str(tower_folder / "denoiser"), context_revision="0"), named)
    with pytest.raises(UserError, match=r"was trained on .* with revision 0, but that is now"):
        export(named, tmp_path / "other")


@pytest.mark.slow
def test_an_adapter_over_one_copy_of_the_weights_is_exported_beside_its_proven_base(tmp_path: Path) -> None:
    folder = build_tower_folder(tmp_path / "shared", lora=default_settings(4))
    figures = export(folder, tmp_path / "out")
    assert figures["towers"]["context"]["verified"] and list(figures["towers"]) == ["context"]
    assert generate(tmp_path / "out", tmp_path) == generate(folder, tmp_path / "out")
