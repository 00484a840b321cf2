"""LoRA adapters: merged weights say what the adapted model said, and what cannot be merged is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.adapters import CONFIG, WEIGHTS
from model.backbone import Backbone, load_backbone
from model.errors import UserError
from tests.adapters import build_adapter
from tests.oracles import logits_of

IDS = torch.tensor([20, 30, 40, 50])


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "lora", seed=1)


def logits(backbone: Backbone) -> torch.Tensor:
    causal = torch.ones(len(IDS), len(IDS), dtype=torch.bool).tril()
    with torch.no_grad():
        return logits_of(backbone.model, IDS, torch.arange(len(IDS)), causal)


def test_a_merged_adapter_changes_the_model_as_peft_itself_does(tiny_model: Path, adapter: Path) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    expected = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_model), adapter).eval()
    merged = load_backbone(tiny_model, adapter=adapter)
    with torch.no_grad():
        torch.testing.assert_close(logits(merged), expected(IDS[None]).logits[0], rtol=1e-4, atol=1e-4)
    plain = load_backbone(tiny_model)
    assert (logits(merged) - logits(plain)).abs().max() > 0.1
    assert type(merged.model) is type(plain.model), "nothing of the adapter is left in the way of a forward"
    assert merged.name != plain.name and merged.revision != plain.revision


def damaged(adapter: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).write_bytes((adapter / name).read_bytes())
    return folder


def refused(model: Path, adapter: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_backbone(model, adapter=adapter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_merged_is_one_sentence(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    assert CONFIG in refused(tiny_model, tiny_model)
    assert "no such folder" in refused(tiny_model, tmp_path / "absent")
    no_weights = damaged(adapter, tmp_path / "no_weights")
    (no_weights / WEIGHTS).rename(no_weights / "adapter_model.bin")
    assert WEIGHTS in refused(tiny_model, no_weights), "pickled weights are never read"
    truncated = damaged(adapter, tmp_path / "truncated")
    (truncated / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-100])
    assert WEIGHTS in refused(tiny_model, truncated)
    other_kind = damaged(adapter, tmp_path / "other_kind")
    (other_kind / CONFIG).write_text(json.dumps({"peft_type": "PROMPT_TUNING"}))
    assert "PROMPT_TUNING" in refused(tiny_model, other_kind)
    other_shape = damaged(adapter, tmp_path / "other_shape")
    tensors = {name: torch.zeros(t.shape[0], t.shape[1] + 1) for name, t in load_file(adapter / WEIGHTS).items()}
    save_file(tensors, other_shape / WEIGHTS)
    assert "does not fit" in refused(tiny_model, other_shape)
