"""A TwoTower folder with an adapter for a denoiser: peft reads it, it comes back as it was, and nothing else does."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.backbone import load_backbone
from model.errors import UserError
from model.two_tower.adapter import default_settings
from model.two_tower.decoding import TowerRequest, write_blocks, write_tokens
from model.two_tower.folder import TwoTowerModel, load_two_tower, make_two_tower, save_two_tower
from model.two_tower.prefix import recording
from model.two_tower.shared import SharedDenoiser
from model.two_tower.towers import run_tower
from tests.tiny import build_tiny_model
from tests.towers import relative_error, scatter

REQUEST = TowerRequest((20, 21, 22, 23, 24), 9)
WEIGHTS, CONFIG, MASK = "adapter_model.safetensors", "adapter_config.json", "mask_embedding.safetensors"


@pytest.fixture(scope="module")
def model(base: Path) -> TwoTowerModel:
    torch.manual_seed(0)
    made = make_two_tower(load_backbone(base), block_size=4, lora=default_settings(4))
    scatter(made.towers)
    made.towers.writer().eval()
    return made


def blocks(model: TwoTowerModel) -> tuple[int, ...]:
    return write_blocks(model.towers, [REQUEST])[0].token_ids


def writer_of(model: TwoTowerModel) -> SharedDenoiser:
    writer = model.towers.writer()
    assert isinstance(writer, SharedDenoiser)
    return writer


def test_a_saved_adapter_writes_the_same_blocks_over_a_copy_or_a_reference(
    model: TwoTowerModel, saved: Path, base: Path, tmp_path: Path
) -> None:
    assert sorted(p.name for p in saved.iterdir()) == [
        "context", "denoiser", MASK, "time_conditioning.safetensors", "two_tower.json"
    ]  # fmt: skip
    assert json.loads((saved / "two_tower.json").read_text())["denoiser"] == "lora"
    loaded = load_two_tower(saved)
    assert writer_of(loaded).causal_lm is loaded.context.model
    save_two_tower(model, tmp_path / "reference", context=False)
    referring = load_two_tower(tmp_path / "reference")
    assert blocks(loaded) == blocks(referring) == blocks(model)
    ours, theirs = (writer_of(m).state_dict() for m in (model, loaded))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()) and ours.keys() == theirs.keys()
    mask = model.towers.config.mask_token_id
    assert loaded.tokenizer.convert_ids_to_tokens(mask) == model.tokenizer.convert_ids_to_tokens(mask)


def test_the_folder_is_smaller_than_one_copy_of_the_base_and_holds_safetensors_only(saved: Path) -> None:
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert not [path.name for path in files if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    names = load_file(saved / "denoiser" / WEIGHTS).keys()
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    assert {name.rpartition("lora_")[2] for name in names} == {"A.weight", "B.weight"}


def test_peft_reads_the_adapter_and_computes_what_the_denoiser_does(
    model: TwoTowerModel, saved: Path, base: Path
) -> None:
    """At a time conditioning that changes nothing, over tokens of which none is the mask."""
    from peft import PeftModel

    peft_model: Any = PeftModel.from_pretrained(load_backbone(base).model, saved / "denoiser").eval()
    ours = load_two_tower(saved).towers.writer()
    ours.time.reset()
    ids, positions, keep = torch.tensor([[20, 21, 22, 23]]), torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool)
    plan = recording(torch.zeros(4, dtype=torch.long), positions[0])
    with torch.no_grad():
        expected = run_tower(peft_model.base_model.model, ids, positions, plan, None, keep).logits
        logits = ours(ids, positions, torch.tensor([0.4]), torch.tensor([0]), plan, {}, keep).logits
    assert relative_error(logits[:, : expected.shape[-1]], expected.flatten(0, -2)) < 1e-5
    assert not logits[:, expected.shape[-1] :].isfinite().any()  # the mask, which the base model does not know


def test_ar_mode_needs_no_adapter_and_hangs_nothing_on_the_model(copied: Path, model: TwoTowerModel) -> None:
    for name in ("denoiser", MASK):
        path = copied / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    alone = load_two_tower(copied, denoiser=False)
    assert write_tokens(alone.towers, [REQUEST])[0].token_ids == write_tokens(model.towers, [REQUEST])[0].token_ids
    assert not any(module._forward_hooks for module in alone.context.model.modules())


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def without(path: Path, end: str) -> None:
    save_file({name: x for name, x in load_file(path).items() if not name.endswith(end)}, path)


BREAKS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: changed(f / "denoiser" / CONFIG, r=8), r"is \(4, 64\), but the denoiser needs \(8, 64\)"),
    (lambda f: changed(f / "denoiser" / CONFIG, r=0), "r must be a whole number from 1 on, not 0"),
    (lambda f: changed(f / "denoiser" / CONFIG, lora_alpha="x"), "lora_alpha must be a number"),
    (
        lambda f: changed(f / "denoiser" / CONFIG, peft_type="IA3"),
        "peft_type is 'IA3', but a denoiser",
    ),
    (lambda f: changed(f / "denoiser" / CONFIG, use_dora=True), "use_dora True is not supported"),
    (lambda f: changed(f / "denoiser" / CONFIG, target_modules=["q_proj"]), "holds the unexpected tensor"),
    (lambda f: changed(f / "denoiser" / CONFIG, target_modules=["nowhere"]), "targets do not fit"),
    (lambda f: changed(f / "denoiser" / CONFIG, target_modules="all"), "target_modules must list names"),
    (lambda f: (f / "denoiser" / CONFIG).write_text("["), "is not readable JSON"),
    (lambda f: (f / "denoiser" / CONFIG).unlink(), f"holds no {CONFIG}"),
    (lambda f: without(f / "denoiser" / WEIGHTS, "layers.1.mlp.up_proj.lora_B.weight"), "lacks tensor base_model"),
    (lambda f: (f / "denoiser" / WEIGHTS).write_bytes(b"0" * 64), "is damaged"),
    (lambda f: (f / MASK).unlink(), f"lacks {MASK}"),
    (lambda f: save_file({"vector": torch.zeros(3)}, f / MASK), r"vector is \(3,\), but the denoiser needs \(32,\)"),
    (lambda f: changed(f / "two_tower.json", denoiser="clone"), "denoiser"),
    (lambda f: changed(f / "two_tower.json", denoiser="copy"), "denoiser must be one of clone, lora, not 'copy'"),
]


@pytest.mark.parametrize(("spoil", "message"), BREAKS)
def test_what_does_not_belong_together_is_refused(copied: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(copied)
    with pytest.raises(UserError, match=message):
        load_two_tower(copied)


def test_other_base_weights_than_the_adapters_own_are_refused(copied: Path, saved: Path) -> None:
    shutil.rmtree(copied / "context")
    build_tiny_model(copied / "context", initializer_range=0.2)
    with pytest.raises(UserError, match="other weights than the denoiser was trained on"):
        load_two_tower(copied)


class _Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("a pickle was loaded",)


def test_a_pickle_in_the_folder_is_never_loaded(copied: Path) -> None:
    """Under every name that peft or transformers would look for, beside the tensors and instead of them."""
    for name in ("adapter_model.bin", "pytorch_model.bin", "adapter_model.pt"):
        for folder in (copied, copied / "denoiser"):
            (folder / name).write_bytes(pickle.dumps(_Bomb()))
    load_two_tower(copied)
    (copied / "denoiser" / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"holds no adapter_model\.safetensors \(only adapter_model\.bin\)"):
        load_two_tower(copied)


def test_one_copy_of_the_weights_lies_on_one_device(saved: Path) -> None:
    with pytest.raises(UserError, match="one copy of the weights, which cannot lie on cpu and meta"):
        load_two_tower(saved, denoiser_device="meta")
