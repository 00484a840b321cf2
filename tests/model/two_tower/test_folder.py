"""A TwoTower model on disk: it comes back as it was, and what does not belong together is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.backbone import load_backbone
from model.errors import UserError
from model.two_tower.decoding import TowerRequest, write_blocks, write_tokens
from model.two_tower.folder import TwoTowerModel, load_two_tower, make_two_tower, save_two_tower
from model.two_tower.published import ARCHITECTURE, load_published, map_name, regroup
from tests.tiny import build_tiny_model
from tests.towers import scatter

REQUEST = TowerRequest((20, 21, 22, 23, 24), 9)


@pytest.fixture(scope="module")
def model(base: Path) -> TwoTowerModel:
    made = make_two_tower(load_backbone(base), block_size=4)
    scatter(made.towers)
    made.towers.writer().eval()
    return made


def blocks(model: TwoTowerModel) -> tuple[int, ...]:
    return write_blocks(model.towers, [REQUEST])[0].token_ids


def test_a_saved_model_writes_the_same_blocks(model: TwoTowerModel, saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == [
        "context", "denoiser", "time_conditioning.safetensors", "two_tower.json"
    ]  # fmt: skip
    loaded = load_two_tower(saved)
    assert blocks(loaded) == blocks(model)
    assert loaded.towers.config == replace(model.towers.config, context="context", context_revision=None)


def test_both_towers_are_ordinary_hugging_face_folders(model: TwoTowerModel, saved: Path, base: Path) -> None:
    for name in ("context", "denoiser"):
        assert json.loads((saved / name / "config.json").read_text())["model_type"] == "llama"
        assert load_backbone(saved / name).model.state_dict().keys() == load_backbone(base).model.state_dict().keys()


def test_a_reference_to_the_base_model_replaces_the_copy_and_must_find_the_same_weights(
    model: TwoTowerModel, base: Path, tmp_path: Path
) -> None:
    save_two_tower(model, tmp_path / "towers", context=False)
    assert not (tmp_path / "towers" / "context").exists()
    assert blocks(load_two_tower(tmp_path / "towers")) == blocks(model)
    config = json.loads((tmp_path / "towers" / "two_tower.json").read_text())
    assert config["context"] == str(base)
    (tmp_path / "towers" / "two_tower.json").write_text(json.dumps({**config, "context_revision": "0" * 16}))
    with pytest.raises(UserError, match="with revision 0000000000000000, but that is now"):
        load_two_tower(tmp_path / "towers")


def test_ar_mode_needs_no_denoiser_on_disk(model: TwoTowerModel, copied: Path) -> None:
    shutil.rmtree(copied / "denoiser")
    alone = load_two_tower(copied, denoiser=False)
    assert write_tokens(alone.towers, [REQUEST])[0].token_ids == write_tokens(model.towers, [REQUEST])[0].token_ids
    with pytest.raises(UserError, match="lacks the folder denoiser"):
        load_two_tower(copied)


def test_what_does_not_belong_together_is_refused(copied: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            load_two_tower(copied)

    time = load_file(copied / "time_conditioning.safetensors")
    config = json.loads((copied / "two_tower.json").read_text())
    save_file({**time, "more": torch.zeros(1)}, copied / "time_conditioning.safetensors")
    refused("holds the unexpected tensor more")
    save_file({k: v for k, v in time.items() if k != "tables"}, copied / "time_conditioning.safetensors")
    refused("lacks tensor tables")
    save_file({**time, "tables": torch.zeros(2, 3, 32)}, copied / "time_conditioning.safetensors")
    refused(r"tables is \(2, 3, 32\), but the denoiser needs \(4, 3, 32\)")
    (copied / "time_conditioning.safetensors").write_bytes(b"0" * 64)
    refused("is damaged")
    (copied / "time_conditioning.safetensors").unlink()
    refused("lacks time_conditioning.safetensors")
    for changed, message in (
        ({"block_size": "4"}, "block_size must be a whole number"),
        ({"orders": "published"}, "unknown key 'orders': did you mean 'order'"),
        ({"order": "first"}, "order must be one of norm_first, published"),
        ({"mask_token_id": 500}, "mask_token_id 500 is outside the model's vocabulary"),
    ):
        (copied / "two_tower.json").write_text(json.dumps({**config, **changed}))
        refused(message)
    (copied / "two_tower.json").write_text("{")
    refused("not readable JSON")
    shutil.rmtree(copied / "context")
    (copied / "two_tower.json").write_text(json.dumps(config))
    refused("lacks the folder context")


def test_towers_of_different_shapes_do_not_pair(copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "context")
    build_tiny_model(copied / "context", num_hidden_layers=3)
    with pytest.raises(UserError, match="context tower has num_hidden_layers 3, the denoiser 2"):
        load_two_tower(copied)


def test_a_full_vocabulary_gets_its_mask_in_the_denoiser_only(model: TwoTowerModel, base: Path) -> None:
    """Without a spare row the denoiser learns one token more than the context tower knows; a spare row is taken."""
    rows = model.context.model.get_input_embeddings().num_embeddings
    assert model.towers.config.mask_token_id == rows
    assert model.towers.writer().causal_lm.get_input_embeddings().num_embeddings == rows + 1
    assert rows not in blocks(model)
    assert model.tokenizer.convert_ids_to_tokens(rows) == "|<MASK>|"
    roomy = load_backbone(base)
    roomy.model.resize_token_embeddings(rows + 5, mean_resizing=False)
    made = make_two_tower(roomy, block_size=4)
    assert made.towers.config.mask_token_id == rows
    assert made.towers.writer().causal_lm.get_input_embeddings().num_embeddings == rows + 5


# ------------------------------------------------------------------------------------------------- the published layout
def test_the_published_layout_has_exactly_these_names_and_shapes(shared: Path) -> None:
    """layout.json's formulas at the miniature's sizes, mapped to our modules; and its 30B example stays consistent."""
    layout = json.loads((shared / "golden" / "two_tower" / "layout.json").read_text())
    folder = shared / "golden" / "two_tower" / "model"
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    sizes = {letter: config.get(name) for letter, name in layout["symbols"].items()} | {"F": 256}
    sizes["Mi"] = sizes["Mh"] * sizes["Mp"]
    sizes["C"] = sizes["Mi"] + 2 * sizes["G"] * sizes["N"]
    expected = _published_shapes(layout, sizes, config["hybrid_override_pattern"])
    assert {name: list(t.shape) for name, t in tensors.items()} == expected
    assert {map_name(name)[0] for name in expected} == {"context", "denoiser", "time"}
    big = layout["example_30b"]["config"] | {"F": 256}
    big["Mi"] = big["Mh"] * big["Mp"]
    big["C"] = big["Mi"] + 2 * big["G"] * big["N"]
    names = _published_shapes(layout, big, big["hybrid_override_pattern"])
    assert len(names) == layout["example_30b"]["tensors"]
    assert len({map_name(name) for name in names}) == len(names)


def _published_shapes(layout: dict, sizes: dict, pattern: str) -> dict[str, list[int]]:  # type: ignore[type-arg]
    def shape(entry: dict) -> list[int]:  # type: ignore[type-arg]
        return [eval(str(size), {}, sizes) for size in entry["shape"]]

    kinds = {key[0]: entries for key, entries in layout["per_layer"].items() if key != "every layer"}
    found: dict[str, list[int]] = {}
    for entry in layout["top_level"]:
        for i in range(len(pattern)):
            found[entry["name"].replace("{i}", str(i))] = shape(entry)
    for tower in ("context_tower", "denoiser_tower"):
        for entry in layout["per_tower"]:
            found[entry["name"].replace("{T}", tower)] = shape(entry)
        for i, letter in enumerate(pattern):
            for entry in (*layout["per_layer"]["every layer"], *kinds[letter]):
                for e in range(sizes["E"] if "{e}" in entry["name"] else 1):
                    name = entry["name"].replace("{T}", tower).replace("{i}", str(i)).replace("{e}", str(e))
                    found[name] = shape(entry)
    return found


def test_a_published_checkpoint_loads_from_several_files_and_refuses_gaps(shared: Path, tmp_path: Path) -> None:
    source = shared / "golden" / "two_tower" / "model_attention"
    tensors = load_file(source / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path / "config.json")
    assert ARCHITECTURE in json.loads((tmp_path / "config.json").read_text())["architectures"]
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    whole, split = (load_published(folder, dtype=torch.float32, block_size=4) for folder in (source, tmp_path))
    assert write_blocks(whole, [REQUEST])[0].token_ids == write_blocks(split, [REQUEST])[0].token_ids
    kept = {name: tensor for name, tensor in tensors.items() if "experts.2." not in name}
    with pytest.raises(UserError, match=r"lacks number 2 of model\.layers\.1\.mixer\.experts"):
        regroup(kept)
    with pytest.raises(UserError, match="no tensor of the published TwoTower layout"):
        regroup({"tower.weight": torch.zeros(1)})
    save_file({n: tensors[n] for n in names[::2] if n != "lm_head.weight"}, tmp_path / "model-0.safetensors")
    save_file({n: tensors[n] for n in names[1::2] if n != "lm_head.weight"}, tmp_path / "model-1.safetensors")
    with pytest.raises(UserError, match=r"denoiser tower lacks tensor lm_head\.weight"):
        load_published(tmp_path)
