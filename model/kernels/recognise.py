"""Which models the fused forward knows, and how their weights are found: checks by exact type, never by guess."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model.packed_linear import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")  # of transformers, each with its ForCausalLM
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # inverse frequencies that never change with the length
PLAIN = (nn.Embedding, nn.Linear, PackedLinear, nn.ModuleList, nn.SiLU)
PARTS = ("DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding", "Model", "ForCausalLM")
INNER_PACK = 16  # rows of gate and of up that stand together in a panel


def families() -> tuple[type[PreTrainedModel], ...]:
    """The classes that it knows."""
    import transformers  # whose classes cost seconds to load: whoever has a model has paid for them

    return tuple(getattr(transformers, f"{family}ForCausalLM") for family in FAMILIES)


def why_not(model: PreTrainedModel, *, hooked: bool = False) -> str | None:
    """Why the fused forward does not know this model, or None where it does. hooked: its hooks are known."""
    known = families()
    if type(model) not in known:
        return f"{type(model).__name__} is not one of {', '.join(f.__name__ for f in known)}"
    config = model.config
    first = next(model.parameters())
    rotary = model.model.rotary_emb
    width = model.model.layers[0].self_attn.head_dim
    family = type(model).__name__.removesuffix("ForCausalLM")
    strange = Counter(type(m).__name__ for m in model.modules() if not _known(m, model, family))
    problems = (
        (bool(strange), f"it contains {', '.join(strange)}"),
        (not hooked and any(_has_hooks(m) for m in model.modules()), "its modules have hooks"),
        (any(p.device.type != "cpu" for p in model.parameters()), "it is not on the CPU"),
        (first.dtype not in (torch.float32, torch.bfloat16), f"its weights are {first.dtype}"),
        (any(p.dtype != first.dtype for p in model.parameters()), "its weights are of several dtypes"),
        (config.hidden_act != "silu", f"its activation is {config.hidden_act}"),
        (rotary.rope_type not in STATIC_ROPE, f"its rotary embedding is {rotary.rope_type}"),
        (2 * rotary.inv_freq.numel() != width, "it rotates a part of each head only"),
    )
    return next((reason for found, reason in problems if found), None)


def _known(module: nn.Module, model: PreTrainedModel, family: str) -> bool:
    if type(module) in PLAIN:
        return True
    if type(module).__name__ == "SiLUActivation":
        return type(module).__module__ == "transformers.activations"
    names = {family + part for part in PARTS}
    return type(module).__name__ in names and type(module).__module__ == type(model).__module__


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@dataclass(frozen=True)
class LayerTensors:
    """Weights of a layer, float32 and contiguous. gate_up [inner / 16 * 32, hidden]: 16 rows of gate, 16 of up, ..."""

    norm_in: Tensor
    norm_mid: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def layer_tensors(layer: Any) -> LayerTensors:
    """The weights of one decoder layer (one of a model that `why_not` accepts)."""
    attention, mlp = layer.self_attn, layer.mlp
    mixed = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
    return LayerTensors(
        norm_in=plain(layer.input_layernorm.weight),
        norm_mid=plain(layer.post_attention_layernorm.weight),
        qkv=torch.cat([plain(linear.weight) for linear in mixed]),
        qkv_bias=None if mixed[0].bias is None else torch.cat([plain(linear.bias) for linear in mixed]),
        query_norm=None if norms[0] is None else plain(norms[0]),
        key_norm=None if norms[1] is None else plain(norms[1]),
        output=plain(attention.o_proj.weight),
        output_bias=bias_of(attention.o_proj),
        gate_up=_interleave(plain(mlp.gate_proj.weight), plain(mlp.up_proj.weight)),
        gate_up_bias=None
        if mlp.gate_proj.bias is None
        else _interleave(plain(mlp.gate_proj.bias), plain(mlp.up_proj.bias)),
        down=plain(mlp.down_proj.weight),
        down_bias=bias_of(mlp.down_proj),
    )


def plain(tensor: Tensor) -> Tensor:
    """Detached, float32, contiguous; a view of the same memory where it is that already."""
    return tensor.detach().float().contiguous()


def bias_of(linear: nn.Linear) -> Tensor | None:
    """The layer's bias as `plain`, or None."""
    return None if linear.bias is None else plain(linear.bias)


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """[inner, ...] twice -> [inner rounded up to 16, times 2, ...], zeros where inner was rounded up."""
    short = -gate.shape[0] % INNER_PACK
    both = [torch.cat([x, x.new_zeros(short, *x.shape[1:])]).unflatten(0, (-1, INNER_PACK)) for x in (gate, up)]
    return torch.stack(both, dim=1).flatten(0, 2).contiguous()


def sliding_window(model: PreTrainedModel, layer: Any) -> int | None:
    """The sliding window that the layer attends with."""
    window = {
        "Llama": lambda: None,
        "Mistral": lambda: model.config.sliding_window,
        "Qwen2": lambda: layer.self_attn.sliding_window,
        "Qwen3": lambda: layer.self_attn.sliding_window,
    }[type(model).__name__.removesuffix("ForCausalLM")]()
    return None if window is None else int(window)
