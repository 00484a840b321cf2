"""Loading refuses what does not fit with one sentence; what it saves, plain transformers loads."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model.backbone import choose_mask_token, load_backbone, load_tokenizer, make_block_diffusion, save_backbone
from model.checksums import checksum
from model.errors import UserError
from model.objective import BlockDiffusion, predicted_logits
from model.sources import fetch_model
from tests.model.rows import random_rows


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_adapted_folder_is_an_ordinary_one_with_one_more_key(tiny_model: Path, tmp_path: Path) -> None:
    backbone = make_block_diffusion(load_backbone(tiny_model), block_size=8, trained_context_length=64)
    save_backbone(backbone, tmp_path / "adapted")
    again = load_backbone(tmp_path / "adapted")
    assert again.block_diffusion == backbone.block_diffusion
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "adapted")
    ids = torch.arange(20, 40)[None]
    before = AutoModelForCausalLM.from_pretrained(tiny_model)(ids).logits
    assert torch.equal(plain(ids).logits[..., : before.shape[-1]], before)
    names = {p.name for p in (tmp_path / "adapted").iterdir()}
    assert "model.safetensors" in names and not any(n.endswith((".bin", ".pt", ".py")) for n in names)


def test_a_changed_bit_in_a_saved_models_weights_is_named_when_it_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save_backbone(load_backbone(tiny_model), folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path} is not what was written .*: copy the model again, or remove"):
        load_backbone(folder)
    (folder / "checksums.json").unlink()
    load_backbone(folder)
    (folder / "checksums.json").write_text("[")
    with pytest.raises(UserError, match=r"checksums\.json is damaged: restore it, or remove it"):
        load_backbone(folder)


def test_a_checksum_is_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.checksums.CHUNK_BYTES", 3)
    (tmp_path / "a").write_bytes(b"content")
    assert checksum(tmp_path / "a") == f"crc32:{zlib.crc32(b'content'):08x}"


def test_the_mask_token_is_never_eos_bos_or_pad(tiny_model: Path, shared: Path) -> None:
    qwen = load_tokenizer(shared / "data" / "tokenizers" / "qwen2_5")
    mask = choose_mask_token(qwen, 151_936, ())
    assert (mask.token, mask.id, mask.how) == ("|<MASK>|", 151_665, "spare")
    tiny = load_backbone(tiny_model)
    rows = tiny.model.get_input_embeddings().num_embeddings
    chosen = choose_mask_token(tiny.tokenizer, rows, tiny.stop_token_ids)
    assert chosen.id not in {tiny.tokenizer.eos_token_id, tiny.tokenizer.bos_token_id, tiny.tokenizer.pad_token_id}
    assert (chosen.how, chosen.id) == ("new", rows)


def test_a_new_mask_row_grows_the_embedding_and_survives_saving(tiny_model: Path, tmp_path: Path) -> None:
    before = load_backbone(tiny_model).model.get_input_embeddings().num_embeddings
    backbone = make_block_diffusion(load_backbone(tiny_model), block_size=8, trained_context_length=None)
    save_backbone(backbone, tmp_path / "grown")
    again = load_backbone(tmp_path / "grown")
    assert again.model.get_input_embeddings().num_embeddings == before + 1
    assert again.block_diffusion is not None
    assert again.tokenizer.convert_ids_to_tokens(again.block_diffusion.mask_token_id) == "|<MASK>|"


def test_the_published_layout_loads_and_gives_the_same_logits(golden_model: Path, tmp_path: Path) -> None:
    published = Path(shutil.copytree(golden_model, tmp_path / "published"))
    shutil.copyfile(golden_model / "config.fast_dllm.json", published / "config.json")
    ours, theirs = load_backbone(golden_model), load_backbone(published)
    assert ours.block_diffusion == theirs.block_diffusion
    rows = random_rows(0, block_size=32, blocks=3)
    batch = BlockDiffusion(32, 511, 0, ours.layers - 1).batch(rows, [0, 1], 0)
    with torch.no_grad():
        assert torch.equal(predicted_logits(ours.model, batch), predicted_logits(theirs.model, batch))


def test_a_missing_tensor_is_named(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weight model\.layers\.1\.mlp\.up_proj\.weight"):
        load_backbone(copy)


def test_an_unexpected_tensor_is_named(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors") | {"model.extra.weight": torch.zeros(2)}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"unexpected weight model\.extra\.weight"):
        load_backbone(copy)


def test_a_wrong_shape_is_named(copy: Path) -> None:
    edit_config(copy, intermediate_size=48)
    with pytest.raises(UserError, match=r"wrong shape|could not be loaded"):
        load_backbone(copy)


@pytest.mark.parametrize("values", [{"num_hidden_layers": "two"}, {"num_attention_heads": 3}])
def test_a_value_that_the_architecture_does_not_take_is_refused(copy: Path, values: Any) -> None:
    edit_config(copy, **values)
    with pytest.raises(UserError, match=rf"config\.json holds a value.*{next(iter(values)).split('_')[-1]}"):
        load_backbone(copy)


def test_a_damaged_weight_file_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(UserError, match=r"safetensors file is damaged|could not be loaded"):
        load_backbone(copy)


def test_pickled_weights_alone_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match=r"no safetensors weights \(only pytorch_model\.bin\)"):
        load_backbone(copy)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"block_size": 8, "mask_token_id": 3, "block_sise": 9}, "unknown key 'block_sise': did you mean 'block_size'"),
        ({"block_size": 8}, "lacks mask_token_id"),
        ({"block_size": 8, "mask_token_id": 10_000}, "outside the model's vocabulary"),
        ({"block_size": 8, "mask_token_id": 3, "sub_block_size": 3}, "does not divide block_size 8"),
        ({"block_size": 8, "mask_token_id": 3, "method": "magic"}, "method 'magic' is not known"),
        ({"block_size": "8", "mask_token_id": 3}, "block_size must be a whole number"),
        (
            {"block_size": 8, "mask_token_id": 3, "trained_context_length": "64"},
            "trained_context_length must be a whole",
        ),
        ({"block_size": 8, "mask_token_id": 3, "token_shift": 1}, "token_shift must be true or false"),
        ([8, 3], "must be an object"),
    ],
)
def test_a_bad_block_diffusion_entry_is_refused(copy: Path, values: Any, sentence: str) -> None:
    edit_config(copy, block_diffusion=values)
    with pytest.raises(UserError, match=sentence):
        load_backbone(copy)


def test_another_block_size_than_the_checkpoints_is_refused(tiny_adapted_model: Path) -> None:
    with pytest.raises(UserError, match="adapted with block_size 8, not 16"):
        make_block_diffusion(load_backbone(tiny_adapted_model), block_size=16, trained_context_length=None)


def test_a_source_that_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    cases = (
        ("missing", "no such folder"),
        ("file.txt", "is a file"),
        ("empty", "no tokenizer could be loaded|no config.json"),
    )
    for name, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            load_backbone(tmp_path / name)
    with pytest.raises(UserError, match="no such folder"):
        fetch_model((tmp_path / "nothing").as_uri())


def test_a_uri_is_fetched_once_and_without_pickles(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKCAST_CACHE", str(tmp_path / "cache"))
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    (copy / "modeling.py").write_text("raise SystemExit")
    folder = fetch_model(copy.as_uri())
    assert {p.name for p in folder.iterdir()} == {p.name for p in copy.iterdir()} - {"pytorch_model.bin", "modeling.py"}
    (copy / "config.json").unlink()
    assert fetch_model(copy.as_uri()) == folder and (folder / "config.json").is_file()
    assert not [p for p in folder.parent.iterdir() if p.name.startswith(".part-")]
