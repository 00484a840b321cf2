"""Packed linear layers: the same numbers, the same names, and no stale copy."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from model.backbone import load_backbone, save_backbone
from model.decoding import Decoder
from model.packed_linear import PackedLinear, can_pack, pack_linears

needs_onednn = pytest.mark.skipif(not can_pack(nn.Linear(1, 1)), reason="this machine's torch has no oneDNN")


def some_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Sequential(nn.Linear(48, 16, bias=False)))


@needs_onednn
def test_packing_keeps_results_names_and_parameters() -> None:
    model, x = some_model(), torch.randn(1, 7, 24)
    parameters = dict(model.named_parameters())
    with torch.inference_mode():
        before = model(x)
        pack_linears(model)
        after = model(x)
    assert isinstance(model[0], PackedLinear) and isinstance(model[2][0], PackedLinear)
    assert torch.allclose(before, after, atol=1e-5)
    assert dict(model.named_parameters()) == parameters
    assert list(model.state_dict()) == list(parameters)


@needs_onednn
def test_a_row_s_product_does_not_depend_on_the_rows_beside_it() -> None:
    layer, x = PackedLinear(nn.Linear(48, 40)), torch.randn(67, 48)
    with torch.inference_mode():
        whole = layer(x)
        for count in (4, 8, 12, 36):
            assert torch.equal(layer(x[:count].contiguous()), whole[:count])


@needs_onednn
def test_a_changed_weight_is_packed_again() -> None:
    layer, x = PackedLinear(nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        layer(x)
        layer.weight.mul_(2)
        assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5)


@needs_onednn
def test_gradients_flow_and_copies_are_made_as_ever() -> None:
    layer, x = PackedLinear(nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        assert torch.equal(twin(x), layer(x))
        assert layer(x[:0]).shape == (0, 8)


@needs_onednn
def test_a_model_that_has_decoded_is_saved_as_it_was_loaded(tiny_adapted_model: Path, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_adapted_model)
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    Decoder(backbone, rows=1)
    save_backbone(backbone, tmp_path / "saved")
    after = load_backbone(tmp_path / "saved").model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
