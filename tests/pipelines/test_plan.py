"""A plan counts what is there, meets the published hours, and says what would make a run fit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from model.objective import BlockDiffusion, TrainingModel
from pipelines.jobkit import main
from pipelines.plan import PlanConfig, plan, run
from pipelines.planning.forecast import Assumed, forecast, largest_micro_rows, remedies
from pipelines.planning.hardware import GPUS, Cluster
from pipelines.planning.memory import layer_bytes, memory_of
from pipelines.planning.published import EFFICIENCY, OVERLAP, RUNS, check_published
from pipelines.planning.setup import Setup
from pipelines.planning.shape import Shape, shape_of, shape_of_config
from pipelines.planning.told import cpu_setup
from pipelines.planning.traffic import traffic_of
from pipelines.planning.work import own_rows, work_of
from tests.published import build_published

SEVEN = "Qwen/Qwen2.5-7B-Instruct"
BENCHES = Path(__file__).parents[2] / "docs" / "benches"


def planned(*words: object) -> int:
    return main("plan", PlanConfig, run, plan, [str(word) for word in words])


def content(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What `--show json` prints, whatever the exit code."""
    planned(*words, "--show", "json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(scope="module")
def seven() -> Shape:
    return shape_of(SEVEN)


def on_gpus(workers: int, **changes: Any) -> Setup:
    setup = cpu_setup(workers=workers, width=2, micro_rows=1, rows_per_step=256, row_tokens=2048, checkpointing=True)
    return replace(setup, cuda=True, reduce_bucket=500_000_000, **changes)


# ------------------------------------------------------------------------------------------------------------- shapes
def test_parameters_are_those_of_the_real_model(tiny_model: Path, golden_model: Path, tmp_path: Path) -> None:
    """Counted without weights: also of the published layout, tied or not."""
    folders = [tiny_model, *(build_published(golden_model, tmp_path / str(t), tied=t) for t in (True, False))]
    for number, folder in enumerate(folders):
        (bare := tmp_path / f"bare{number}").mkdir()
        (bare / "config.json").write_text((folder / "config.json").read_text())
        assert shape_of(str(bare)) == replace(shape_of(str(folder)), name=str(bare)), "config.json is enough"
    real = AutoModelForCausalLM.from_pretrained(tiny_model)
    shape = shape_of(str(tiny_model))
    assert shape.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert shape.matrices == sum(p.numel() for p in real.model.layers.parameters() if p.ndim == 2)
    tied, untied = (shape_of(str(folder)) for folder in folders[1:])
    assert untied.parameters - tied.parameters == tied.embedding
    assert (tied.tied, untied.tied) == (True, False)


def test_the_published_base_models_need_no_hub(seven: Shape) -> None:
    assert (seven.parameters, seven.tied) == (7_615_616_512, False), "as their model cards say: 7.61 B"
    assert shape_of("Qwen/Qwen2.5-1.5B-Instruct").parameters == 1_543_714_304


def test_of_a_mixture_only_the_visited_experts_count_as_work() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    shape = shape_of_config(config, "mixture")
    experts = 2 * 8 * 3 * 32 * 16
    attention = 2 * (32 * 32 * 2 + 32 * 16 * 2)
    assert shape.matrices == attention + 2 * 8 * 32 + experts // 4
    assert shape.mixture


# ------------------------------------------------------------------------------------------------------------- memory
def test_what_stays_is_18_bytes_a_parameter_over_all_workers(seven: Shape) -> None:
    """bfloat16 weights 2, float32 sums of gradients 4, master copy and two moments 12."""
    for workers in (8, 64):
        memory = memory_of(seven, on_gpus(workers))
        shared = (memory.weights + memory.gradients + memory.optimizer) * workers
        assert shared == pytest.approx(18 * seven.parameters)
    two = memory_of(seven, on_gpus(8, zero_stage=2))
    assert two.weights == 2 * seven.parameters and two.gathered == 0


def test_a_layer_keeps_the_bytes_that_autograd_saves(tiny_model: Path) -> None:
    """Counted on a real forward with hooks on every saved tensor."""
    from model.backbone import load_backbone
    from tests.packed import counting_rows

    backbone = load_backbone(tiny_model)
    rows = counting_rows(2, blocks=6, block_size=8, mask_token_id=3)
    batch = BlockDiffusion(8, 3, 0, backbone.layers - 1, keep_all=True).batch(rows, [0, 1], 0)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.shape[-2:-1] == (batch.tokens,) or batch.tokens in tensor.shape:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    module = TrainingModel(backbone.model).train()
    parameters = {p.untyped_storage().data_ptr() for p in backbone.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(batch)
    saved = sum(size for place, size in kept.items() if place not in parameters)
    setup = cpu_setup(workers=1, width=4, micro_rows=2, rows_per_step=2, row_tokens=48, checkpointing=False)
    assert setup.micro_tokens == batch.tokens
    memory = memory_of(shape_of(str(tiny_model)), setup)
    assert loss.detach() > 0
    assert memory.activations == pytest.approx(saved, rel=0.15)
    assert layer_bytes(shape_of(str(tiny_model)), setup) > 0


def test_the_forecast_of_memory_is_within_15_percent_of_real_workers() -> None:
    """The committed measurements of 1, 2 and 4 ZeRO-3 workers, forecast again by the code as it is now."""
    from pipelines.benches.training_memory import MemoryBenchConfig, forecast_memory

    seen = set()
    for path in BENCHES.glob("memory*.json"):
        measured = json.loads(path.read_text())
        config = MemoryBenchConfig(**measured["setting"])
        for line in measured["table"]:
            peak = forecast_memory(config, line["workers"], line["checkpointing"] == "yes").peak
            assert peak / 1e6 == pytest.approx(line["measured MB a worker"], rel=0.15), line
            seen.add(line["workers"])
    assert seen == {1, 2, 4}


# --------------------------------------------------------------------------------------------------------------- time
def test_both_published_times_are_met_within_a_quarter_with_one_efficiency() -> None:
    for check in check_published():
        assert abs(check.error) < 0.25
        assert abs(check.left_out / check.run.hours - 1) < 0.25, "also calibrated on the other run alone"
        assert 0.15 < check.implied_mfu < 0.35
    assert [check.run.hours for check in check_published()] == [8.0, 12.0] and len(RUNS) == 2


def test_traffic_is_what_zero_sends(seven: Shape) -> None:
    """A forward and a backward gather everything, every micro-step reduces everything; each but one's own share."""
    setup = on_gpus(64)
    assert setup.micro_steps == 4
    passed = 2 * seven.parameters * 63 / 64
    traffic = traffic_of(seven, setup)
    assert (traffic.gathers, traffic.reductions) == pytest.approx((2 * 4 * passed, 4 * passed))
    assert traffic_of(seven, on_gpus(64, zero_stage=1)).total == pytest.approx(2 * passed)
    assert traffic_of(seven, on_gpus(1)).total == 0


def test_more_gpus_are_faster_and_a_slow_network_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", SEVEN, "--train.workers", "auto", "--hardware.nodes"]
    hours = {nodes: content(capsys, *words, nodes)["run"]["hours"] for nodes in (2, 4, 8)}
    assert hours[2] > hours[4] > hours[8]
    slow = content(capsys, *words, 8, "--hardware.network_gbit", 25)
    assert slow["run"]["hours"] > 1.5 * hours[8]
    assert content(capsys, *words, 8, "--hardware.tflops", 624)["run"]["hours"] < hours[8]


def test_offloading_moves_memory_off_the_gpu_and_costs_time(seven: Shape) -> None:
    cluster = Cluster("a100-40gb", GPUS["a100-40gb"], 1, 8)
    assumed = Assumed(EFFICIENCY, OVERLAP, documents=1)
    here = forecast(seven, on_gpus(8), cluster, assumed, 1)
    there = forecast(seven, on_gpus(8, offload_optimizer="cpu"), cluster, assumed, 1)
    assert there.memory.host == here.memory.optimizer + here.memory.gradients
    assert there.memory.peak < here.memory.peak - 0.9 * there.memory.host
    assert there.time.step > here.time.step
    disk = forecast(seven, on_gpus(8, offload_optimizer="nvme"), cluster, assumed, 1)
    assert disk.memory.host == 0 and disk.time.step > there.time.step


# ---------------------------------------------------------------------------------------------------------- the answer
@pytest.mark.parametrize("recipe", ["qwen2.5-1.5b", "qwen2.5-7b"])
def test_a_recipe_is_planned_with_adapts_own_command_line(
    project: Path, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project / "deploy" / "recipes" / f"{recipe}.yaml"
    assert planned("--config", path, "--output", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    steps = yaml.safe_load(path.read_text())["train"]["steps"]
    for words in ("fits", "GPU-hours", "largest micro_rows", f"{steps:,}", "implied MFU"):
        assert words in printed
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["fits"] and written["run"]["steps"] == steps
    assert written["run"]["gpu_hours"] == pytest.approx(64 * written["run"]["hours"])
    assert "## What this rests on" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_what_does_not_fit_ends_with_1_and_what_would_fit_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", SEVEN, "--hardware.gpu", "rtx4090-24gb", "--hardware.nodes", 1, "--hardware.gpus_per_node", 4]
    assert planned(*words, "--train.workers", "auto") == 1
    captured = capsys.readouterr()
    assert "It does not fit" in captured.err and "What would fit: --" in captured.err
    found = content(capsys, *words, "--train.workers", "auto")
    assert found["memory"]["largest_micro_rows"] == 0
    assert all(one["peak_gb"] <= 24 for one in found["would_fit"])


def test_every_remedy_fits_and_the_largest_micro_batch_is_the_largest(seven: Shape) -> None:
    cluster = Cluster("a100-40gb", GPUS["a100-40gb"], 1, 8)
    setup = on_gpus(8, micro_rows=4, checkpointing=False)
    assert memory_of(seven, setup).peak > 40e9
    found = remedies(seven, setup, cluster)
    assert found and all(one.peak <= 40e9 for one in found)
    smaller = replace(setup, checkpointing=True)
    rows = largest_micro_rows(seven, smaller, cluster)
    assert memory_of(seven, replace(smaller, micro_rows=rows)).peak <= 40e9
    assert memory_of(seven, replace(smaller, micro_rows=rows + 1)).peak > 40e9


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--model is required"),
        (["--model", "no/where/at/all"], "no such folder"),
        (["--model", SEVEN, "--hardware.gpu", "tpu"], "is not in the table"),
        (["--model", SEVEN, "--train.workers", "60"], "do not fill whole nodes of 8 GPUs"),
        (["--model", SEVEN, "--hardware.gpuu", "x"], "did you mean --hardware.gpu"),
        (["--model", SEVEN, "--train.device", "cpu"], "knows the rates of GPUs only"),
        (["--model", SEVEN, "--train.workers", "0"], "train.workers is 0 (on the command line): it must be at least 1"),
        (["--model", SEVEN, "--train.steps", "1" + 400 * "0"], "steps must be at most 9223372036854775807"),
        (["--model", SEVEN, "--pack.context_length", "65536"], "are longer than the 32,768 positions of"),
        (["--model", SEVEN, "--train.document_padding", "false"], "document_mask"),
        (["--model", SEVEN, "--objective", "next_token", "--train.ar_loss_weight", "1"], "belong to block_diffusion"),
        (["--model", SEVEN, "--train.lora.targets", "q_prj"], "plan knows the linear modules q_proj"),
        (
            ["--model", SEVEN, "--objective", "two_tower", "--two_tower.denoiser", "lora"],
            "plan knows no --two_tower.denoiser lora",
        ),
    ],
)
def test_bad_usage_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(*words) == 2
    assert sentence in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1, 2]", "must hold a JSON object, not list"),
        ("null", "must hold a JSON object, not NoneType"),
        ('{"model_type": "bert"}', "laid out like Llama and Qwen, not bert"),
        ('{"model_type": "gpt2"}', "laid out like Llama and Qwen, not gpt2"),
        ('{"model_type": "qwen2", "hidden_size": -64}', "makes no causal language model"),
        ('{"model_type": "qwen2", "num_attention_heads": 0}', "makes no causal language model"),
        ('{"model_type": "qwen2", "hidden_size": 1000000000000}', "makes no causal language model"),
    ],
)
def test_a_config_that_describes_no_decoder_is_one_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert planned("--model", tmp_path) == 2
    assert sentence in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_plan_of_another_config_does_not_pass_for_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 2}')
    words = ("--model", tmp_path, "--output", tmp_path / "out")
    assert (planned(*words), planned(*words)) == (0, 0)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 3}')
    assert planned(*words) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_largest_micro_batch_of_a_giant_step_is_found_at_once(seven: Shape) -> None:
    setup = on_gpus(64, rows_per_step=2**62)
    cluster = Cluster("", GPUS["a100-80gb"], 8, 8)
    rows = largest_micro_rows(seven, setup, cluster)
    assert memory_of(seven, replace(setup, micro_rows=rows)).peak <= 80e9
    assert memory_of(seven, replace(setup, micro_rows=rows + 1)).peak > 80e9


def test_without_output_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert planned("--model", "Qwen/Qwen2.5-0.5B-Instruct") == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_runs_as_a_script_from_another_directory(project: Path, tmp_path: Path) -> None:
    """Its answer on standard output is JSON and nothing else, its exit code says that it does not fit."""
    words = ["--model", SEVEN, "--hardware.gpu", "l40s-48gb", "--train.workers", "8", "--train.micro_rows", "32"]
    command = [sys.executable, project / "pipelines" / "plan.py", *words, "--show", "json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["fits"] is False
    assert done.stderr.strip().splitlines()[-1].startswith("plan: It does not fit: ")


def test_adapts_options_reach_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    base = content(capsys, "--model", SEVEN)
    changed = {
        words: content(capsys, "--model", SEVEN, *words.split())
        for words in (
            "--train.zero_stage 2",
            "--train.offload.optimizer cpu",
            "--train.lora.rank 16",
            "--train.ar_loss_weight 0.5",
            "--train.micro_tokens 13000",
            "--objective next_token",
            "--objective two_tower",
        )
    }
    kinds = {words: one["memory"]["kinds_gb"] for words, one in changed.items()}
    assert kinds["--train.zero_stage 2"]["weights"] == pytest.approx(64 * base["memory"]["kinds_gb"]["weights"])
    assert kinds["--train.offload.optimizer cpu"]["optimizer (master copy, two moments)"] == 0
    assert changed["--train.lora.rank 16"]["run"]["checkpoint_gb"] < 0.02 * base["run"]["checkpoint_gb"]
    assert changed["--train.ar_loss_weight 0.5"]["memory"]["network_tokens"] == 4 * 2048
    assert changed["--train.micro_tokens 13000"]["memory"]["micro_rows"] == 2
    assert changed["--objective next_token"]["run"]["hours"] < base["run"]["hours"] / 2
    assert kinds["--objective two_tower"]["weights"] == pytest.approx(65 * base["memory"]["kinds_gb"]["weights"])
    assert planned("--model", SEVEN, "--train.zero_stage", 2, "--train.offload.parameters", "cpu") == 2


def test_the_frozen_tower_is_whole_on_every_worker_and_only_runs_forward(seven: Shape) -> None:
    one = on_gpus(8, streams=1.0)
    two = replace(one, frozen_streams=1.0)
    alone, beside = memory_of(seven, one), memory_of(seven, two)
    assert beside.weights - alone.weights == 2 * seven.parameters
    assert memory_of(seven, replace(two, frozen_shared=True)).weights == alone.weights * 2
    assert (beside.gradients, beside.optimizer) == (alone.gradients, alone.optimizer)
    layers = 2 * seven.matrices * 256 * 2048
    works = [work_of(seven, own_rows(setup, documents=1.0), setup) for setup in (one, two)]
    assert works[1].products - works[0].products == pytest.approx(layers)
    assert works[1].attention > works[0].attention
