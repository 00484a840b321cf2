"""The sizes of a network, from its config alone: parameters are counted on a model without storage.

Letters: H hidden width, A query heads x head width, KV the same of the key heads, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from model.backbone import read_architecture
from model.errors import UserError
from model.sources import fetch_config, first_line
from pipelines.planning import known

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. Parameters are numbers of elements.

    parameters: all, each once. embedding: of the look-up table; head: of the product with the vocabulary (the same
    table where tied). matrices: what a token is multiplied with in all layers, the head left out; of mixtures of
    experts only the experts that a token visits. largest: elements of the largest tensor.
    """

    name: str
    layers: int
    hidden: int
    attention: int
    kv: int
    heads: int
    mlp: int
    vocabulary: int
    tied: bool
    parameters: int
    embedding: int
    matrices: int
    largest: int
    context_length: int

    @property
    def head(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def linear_ends(self) -> dict[str, int]:
        """Inputs and outputs, added, of the linear modules of a layer, by the names that Llama and Qwen give them."""
        down = self.hidden + self.mlp
        query, key = self.hidden + self.attention, self.hidden + self.kv
        ends = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}
        return ends | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), down)

    @property
    def mixture(self) -> bool:
        """Whether a token visits only some of the parameters."""
        return self.matrices + self.embedding + (0 if self.tied else self.head) < 0.9 * self.parameters


def shape_of(source: str) -> Shape:
    """The shape of a folder, URI or Hub id; of a known Hub id without asking the Hub. Weights are never fetched.

    Raises UserError where there is no config, or one that describes no decoder.
    """
    return shape_of_config(read_architecture(config_folder(source)), source)


def config_folder(source: str) -> Path:
    """The folder with the config.json of a model."""
    return known.folder_of(source) or fetch_config(source)


def shape_of_config(config: PreTrainedConfig, name: str) -> Shape:
    """The shape of a transformers config. Raises UserError where it describes no causal decoder."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, RuntimeError, ArithmeticError) as error:
        raise UserError(
            f"{name}: transformers makes no causal language model of its config.json ({first_line(error)})."
        ) from error
    try:
        return _measured(model, config.get_text_config(), name)
    except AttributeError as error:
        raise UserError(
            f"{name}: plan knows decoders that are laid out like Llama and Qwen, not {config.model_type} "
            f"({first_line(error)})."
        ) from error


def _measured(model: Any, text: Any, name: str) -> Shape:
    head_width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is embedding
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Shape(
        name=name,
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        attention=int(text.num_attention_heads) * head_width,
        kv=key_heads * head_width,
        heads=int(text.num_attention_heads),
        mlp=_mlp_width(text),
        vocabulary=int(embedding.shape[0]),
        tied=tied,
        parameters=sum(sizes),
        embedding=embedding.numel(),
        matrices=_visited(model, text),
        largest=max(sizes),
        context_length=int(getattr(text, "max_position_embeddings", 0) or 0),
    )


def _mlp_width(text: Any) -> int:
    """Of the layer's MLP; of a mixture, the widths of the experts that a token visits together."""
    expert = getattr(text, "moe_intermediate_size", None)
    visited = int(getattr(text, "num_experts_per_tok", None) or 1)
    return int(expert) * visited if expert else int(text.intermediate_size) * (visited if _experts(text) else 1)


def _experts(text: Any) -> int:
    return next((int(getattr(text, name)) for name in EXPERT_COUNTS if getattr(text, name, None)), 0)


def _visited(model: Any, text: Any) -> int:
    """Elements of the layers' matrices that one token meets."""
    experts, chosen = _experts(text), int(getattr(text, "num_experts_per_tok", None) or 1)
    total = 0.0
    for name, parameter in model.get_decoder().layers.named_parameters():
        if parameter.ndim < 2:
            continue
        expert = experts and ".experts." in f".{name}"
        total += parameter.numel() * (chosen / experts if expert else 1)
    return round(total)
