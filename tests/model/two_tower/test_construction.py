"""Two towers from any decoder: the denoiser starts as the pretrained model, bit for bit, and nothing is half hooked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from model.errors import UserError
from model.recurrence import Folded
from model.two_tower.config import TwoTowerConfig
from model.two_tower.prefix import recording
from model.two_tower.sublayers import decoder_layers, sublayers_of
from model.two_tower.towers import Denoiser, build_two_tower, run_tower
from tests.towers import CONFIGS, shared_towers, tiny_decoder, tiny_towers


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in CONFIGS), ("qwen2", torch.float32), ("falcon_h1", torch.float32)],
)
def test_the_denoiser_starts_as_the_pretrained_model_bit_for_bit_at_every_time(kind: str, dtype: torch.dtype) -> None:
    towers = tiny_towers(kind, dtype, trained=False)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    positions, keep = torch.arange(8)[None], torch.ones(1, 8, dtype=torch.bool)

    def causal() -> Any:
        return recording(torch.zeros(8, dtype=torch.long), positions[0])

    expected = towers.context.read(ids, positions, causal(), None, keep)
    for t in (0.0, 0.31, 1.0):
        with torch.no_grad():
            ours = towers.writer()(ids, positions, torch.tensor([t]), torch.tensor([0]), causal(), {}, keep).logits
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("order", ["norm_first", "published"])
@pytest.mark.parametrize("kind", ["gemma2", "olmo2", "gpt2", "nemotron_h", "falcon_h1"])
def test_time_and_order_matter_once_trained(kind: str, order: str) -> None:
    towers = tiny_towers(kind, order=order)
    ids, positions, keep = torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool)
    plan = recording(torch.zeros(4, dtype=torch.long), positions[0])
    with torch.no_grad():
        zero = torch.tensor([0])
        at = [towers.writer()(ids, positions, torch.tensor([t]), zero, plan, {}, keep).logits for t in (0.1, 0.9)]
        towers.writer().modulation.set(None, None)
        plain = run_tower(towers.writer().causal_lm, ids, positions, plan, None, keep).logits
    assert not torch.equal(at[0], at[1]) and not torch.equal(at[0], plain)


def test_the_modulation_is_the_formula_of_the_paper() -> None:
    """h = norm(x) (1 + scale) + shift; x = x + gate * branch(h), written out for a Llama layer."""
    towers = tiny_towers("llama", num_hidden_layers=1)
    writer = towers.writer()
    layer: Any = decoder_layers(writer.causal_lm)[0]
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vectors = writer.time(torch.tensor([0.4]))
    (a_shift, a_scale, a_gate), (m_shift, m_scale, m_gate) = vectors[:, 0]
    decoder = writer.causal_lm.get_decoder()
    positions = torch.arange(4)[None]
    rope = decoder.rotary_emb(x, positions)
    plan = recording(torch.zeros(4, dtype=torch.long), positions[0])
    writer.modulation.set(None, None)
    with torch.no_grad():
        h = layer.input_layernorm(x) * (1 + a_scale) + a_shift
        middle = x + a_gate * layer.self_attn(h, position_embeddings=rope, attention_plan=plan)[0]
        h = layer.post_attention_layernorm(middle) * (1 + m_scale) + m_shift
        expected = middle + m_gate * layer.mlp(h)
        writer.modulation.set(vectors, torch.tensor([0]))
        ours = layer(x, position_embeddings=rope, attention_plan=plan)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "olmo2", "granitemoehybrid", "falcon_h1"])
def test_a_gate_scales_all_that_a_sublayer_adds_behind_any_norm(kind: str) -> None:
    """With the second sublayer closed, a gate of 2 adds twice what a gate of 1 adds: no norm divides it out."""
    writer = tiny_towers(kind, num_hidden_layers=2).writer()
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None]
    plan = Folded(recording(torch.zeros(4, dtype=torch.long), positions[0]))
    seen: list[Any] = []
    layer = decoder_layers(writer.causal_lm)[0]
    layer.register_forward_hook(
        lambda module, args, out: seen.append((args[0], out[0] if isinstance(out, tuple) else out))
    )
    for gate in (1.0, 2.0):
        vectors = torch.zeros(4, 1, 3, 32, dtype=torch.float64)
        vectors[0, :, 2] = gate
        writer.modulation.set(vectors, torch.tensor([0]))
        with torch.no_grad():
            writer.causal_lm(input_ids=ids, position_ids=positions, use_cache=False, attention_plan=plan)
    (x, once), (_, twice) = seen
    assert float((once - x).abs().max()) > 0.1
    assert torch.allclose(twice - x, 2 * (once - x), rtol=0, atol=1e-6)


def test_each_tower_has_its_own_weights_and_its_own_config() -> None:
    towers = shared_towers("qwen3")
    context, writer = towers.context.causal_lm, towers.writer().causal_lm
    assert context.config is not writer.config
    mine = {p.data_ptr() for p in writer.parameters()}
    assert not any(p.data_ptr() in mine for p in context.parameters())
    assert context.state_dict().keys() == writer.state_dict().keys()


def test_every_architecture_has_two_sublayers_a_layer_or_says_why_not() -> None:
    counts = {kind: len(sublayers_of(shared_towers(kind).context.causal_lm)) for kind in CONFIGS}
    assert counts == dict.fromkeys(CONFIGS, 4)


def test_a_layer_that_adds_more_than_is_known_is_refused() -> None:
    """A second, hidden branch leaves the residual stream changed even with all gates closed."""
    model = tiny_decoder("llama")
    layer: Any = decoder_layers(model)[0]
    layer.register_forward_hook(lambda module, args, out: out + 0.5)
    with pytest.raises(UserError, match="adds something to its residual stream"):
        Denoiser(model)


def test_a_layer_with_unknown_norms_is_refused() -> None:
    model = tiny_decoder("llama")
    decoder_layers(model)[0].register_module("third_norm", nn.LayerNorm(32))
    with pytest.raises(UserError, match="does not know how LlamaDecoderLayer"):
        Denoiser(model)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("mistral", TwoTowerConfig(8, 3), "sliding window of 6"),
        ("llama", TwoTowerConfig(8, 97), "outside the model's vocabulary of 96"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(kind: str, config: TwoTowerConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_two_tower(tiny_decoder(kind), config)


def test_a_model_with_another_attention_is_refused() -> None:
    model = tiny_decoder("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="attn_implementation='blockcast'"):
        build_two_tower(model, TwoTowerConfig(4, 3))
