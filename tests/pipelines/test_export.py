"""What export writes is an ordinary model with the weights it was given, or nothing at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from actors.training.consolidate import merge_lora
from actors.training.shards import TAG
from model.backbone import load_backbone
from pipelines.export import ExportConfig, plan, run
from pipelines.exporting import proof
from pipelines.jobkit import main
from tests.adapters import build_adapter
from tests.published import build_published
from tests.training_runs import TrainingRun


def export(output: Path, **keys: Any) -> int:
    words = [word for name, value in keys.items() for word in (f"--{name}", str(value))]
    return main("export", ExportConfig, run, plan, [*words, "--output", str(output)])


def figures(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "manifest.json").read_text())["figures"]
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [True, False], ids=["tied, as the 1.5B", "untied, as the 7B"])
def test_a_model_goes_to_the_published_layout_and_back_unchanged(
    golden_model: Path, tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    published = build_published(golden_model, tmp_path / "published", tied=tied)
    assert export(tmp_path / "ours", model=published, verify=str(not tied).lower()) == 0  # seconds: once is enough
    told = "not verified" if tied else "loaded in a fresh process as Qwen2ForCausalLM, logits of 64 tokens"
    assert told in capsys.readouterr().out
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["model_type"], config["block_diffusion"]["mask_token_id"]) == ("qwen2", 511)
    assert export(tmp_path / "back", model=tmp_path / "ours", format="fast_dllm_v2", verify="false") == 0
    assert same(weights(published), weights(tmp_path / "ours"))
    assert same(weights(published), weights(tmp_path / "back"))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (published, tmp_path / "back"))
    assert after.pop("auto_map").keys() == before.pop("auto_map").keys()
    before.pop("transformers_version")
    assert before == after, "every key of the published config.json, and no other"
    assert not list((tmp_path / "back").glob("*.py")), "no remote code is copied"
    back, original = load_backbone(tmp_path / "back"), load_backbone(published)
    assert back.block_diffusion == original.block_diffusion
    assert back.tokenizer.get_vocab() == original.tokenizer.get_vocab()


def test_an_adapter_is_merged_as_peft_itself_does(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    adapter = build_adapter(tiny_model, tmp_path / "lora", seed=3)
    assert export(tmp_path / "merged", model=tiny_model, adapter=adapter, verify="false") == 0
    assert figures(tmp_path / "merged")["verified"] is False
    expected = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_model), adapter).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    assert export(tmp_path / "merged", model=tiny_model, adapter=adapter) == 0
    assert "is complete already" in capsys.readouterr().out
    assert export(tmp_path / "merged", model=tiny_model) == 2, "another model under the same name is refused"


def test_what_cannot_be_exported_is_one_sentence(
    tiny_model: Path, tiny_adapted_model: Path, golden_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**keys: Any) -> str:
        assert export(tmp_path / "out", **keys) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True
        return lines[-1]

    assert "--model is required" in refused()
    assert "was not adapted" in refused(model=tiny_model, format="fast_dllm_v2")
    assert "model_type llama" in refused(model=tiny_adapted_model, format="fast_dllm_v2")
    other_mask = Path(shutil.copytree(golden_model, tmp_path / "other_mask"))
    values = json.loads((golden_model / "config.json").read_text())
    values["block_diffusion"]["mask_token_id"] = 5
    (other_mask / "config.json").chmod(0o644)
    (other_mask / "config.json").write_text(json.dumps(values))
    assert "mask token 't5' (5)" in refused(model=other_mask, format="fast_dllm_v2")
    (tmp_path / "run" / "checkpoints" / "step_3").mkdir(parents=True)
    assert "is the output of adapt" in refused(model=tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step_3"
    assert "holds no COMMIT.json" in refused(model=step)
    commit = {"step": 3, "workers": 1, "identity": "x", "files": {"gone": 7}}
    (step / "COMMIT.json").write_text(json.dumps(commit))
    assert "is damaged: gone is missing. Take another checkpoint" in refused(model=step)
    (step / "COMMIT.json").write_text(json.dumps({**commit, "files": {}}))
    shutil.copytree(tiny_model, step / "model")
    (step / TAG).mkdir()
    (step / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"PK\x03\x04 cut off")
    assert "is damaged, its shards cannot be read" in refused(model=step)
    assert "The adapter /nowhere: there is no such folder" in refused(model=tiny_model, adapter="/nowhere")
    assert "holds no adapter_config.json" in refused(model=tiny_model, adapter=tiny_model)
    adapter = build_adapter(tiny_model, tmp_path / "lora", seed=3)
    (adapter / "adapter_model.safetensors").unlink()
    assert "holds no adapter_model.safetensors" in refused(model=tiny_model, adapter=adapter)


def test_a_folder_that_says_something_else_is_not_published(
    golden_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight is changed on disk between writing and the fresh process."""
    asked = proof._ask

    def tampered(folder: Path, question: Path, kind: str) -> dict[str, Any]:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.2.mlp.up_proj.weight"] *= 1.5
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return asked(folder, question, kind)

    monkeypatch.setattr(proof, "_ask", tampered)
    assert export(tmp_path / "out", model=golden_model) == 1
    assert "gives other logits in a fresh process" in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".export-")]


def test_the_adapter_of_a_checkpoint_is_merged_as_peft_itself_does(tiny_model: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    merged = merge_lora(dict(model.state_dict()), scale=6 / 4)
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys() == plain.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)
    assert not torch.equal(merged["model.layers.0.mlp.down_proj.weight"], plain["model.layers.0.mlp.down_proj.weight"])


def test_a_folder_that_holds_something_else_is_left_as_it_is(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model itself above all, also by way of a link."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (tmp_path / "link").symlink_to(model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for output in (model, tmp_path / "link"):
        assert export(output, model=model, dtype="bfloat16", verify="false") == 2
        assert "which no export wrote" in capsys.readouterr().err.strip().splitlines()[-1]
        assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("model.safetensors", None, "is no file that can be read"),
        ("tokenizer_config.json", "[]", "no tokenizer could be loaded"),
        ("generation_config.json", "[]", "the weights could not be loaded"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}', "describes no model"),
        ("config.json", "[]", "must hold a JSON object"),
    ],
)
def test_a_damaged_model_is_one_sentence_and_leaves_nothing(
    name: str, content: str | None, sentence: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / name).unlink(missing_ok=True)
    if content is None:
        (model / name).symlink_to(tmp_path / "nowhere")
    else:
        (model / name).write_text(content)
    assert export(tmp_path / "out", model=model, verify="false") == 2
    assert sentence in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_the_last_checkpoint_exports_as_the_model_that_the_run_wrote(
    uninterrupted: TrainingRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = uninterrupted.output / "checkpoints" / "step_60"
    assert export(tmp_path / "out", model=checkpoint) == 0
    assert figures(tmp_path / "out")["step"] == 60
    assert same(weights(tmp_path / "out"), weights(uninterrupted.output / "model"))
    ours, runs = load_backbone(tmp_path / "out"), load_backbone(uninterrupted.output / "model")
    assert ours.block_diffusion == runs.block_diffusion and ours.stop_token_ids == runs.stop_token_ids
    earlier = uninterrupted.output / "checkpoints" / "step_50"
    assert export(tmp_path / "earlier", model=earlier, verify="false") == 0
    assert not same(weights(tmp_path / "earlier"), weights(tmp_path / "out"))
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), type(runs.model))
    assert not isinstance(runs.model, Qwen2ForCausalLM)
