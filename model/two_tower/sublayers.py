"""Where a decoder layer adds to its residual stream, found by the names that Hugging Face modeling code uses.

A sublayer is x + mixer(norm(x)): one or more branches (modules whose outputs are added, side by side in Falcon-H1's
attention and Mamba or Granite's experts and shared MLP) behind one norm. Sandwich-norm models have another norm behind
the branch, OLMo 2 has only that one. What is found is checked by running it: see `model.two_tower.modulation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from model.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION, RECURRENT, FEED_FORWARD, EXPERTS = "attention", "recurrent", "feed_forward", "experts"
MIXERS = {
    "self_attn": ATTENTION,
    "attn": ATTENTION,
    "attention": ATTENTION,
    "mamba": RECURRENT,
    "linear_attn": RECURRENT,
    "conv": RECURRENT,
}
FEEDS = {"mlp": FEED_FORWARD, "feed_forward": FEED_FORWARD, "shared_mlp": FEED_FORWARD, "block_sparse_moe": EXPERTS}
SOLE = {"linear_attention": RECURRENT, "full_attention": ATTENTION, "moe": EXPERTS, "mlp": FEED_FORWARD}


class Norms(NamedTuple):
    """Names of the norms before and behind the mixer and the feed-forward part; None where a layer has none there."""

    mixer: str | None
    behind_mixer: str | None
    feed: str | None
    behind_feed: str | None


ARRANGEMENTS = (
    Norms("input_layernorm", None, "post_attention_layernorm", None),  # Llama, Qwen, Mistral, Phi-3, Granite
    Norms("input_layernorm", None, "pre_ff_layernorm", None),  # Falcon-H1
    Norms("ln_1", None, "ln_2", None),  # GPT-2
    Norms("operator_norm", None, "ffn_norm", None),  # LFM2
    Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
    Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
)


@dataclass(frozen=True)
class Sublayer:
    """One term of a layer. slot: 0 for the layer's first sublayer, 1 for its second.

    norm: before the branches, None where there is none. gated: the modules whose outputs the gate scales.
    """

    layer: int
    slot: int
    kind: str
    norm: nn.Module | None
    branches: tuple[nn.Module, ...]
    gated: tuple[nn.Module, ...]


def decoder_layers(causal_lm: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers. Raises UserError where none are found."""
    decoder = causal_lm.get_decoder()
    for name in ("layers", "h"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise UserError(f"{type(decoder).__name__} has no list of layers that TwoTower knows.")


def sublayers_of(causal_lm: PreTrainedModel) -> list[Sublayer]:
    """All sublayers, in the order in which they add to the residual stream. Raises UserError for an unknown layer."""
    found = []
    for index, layer in enumerate(decoder_layers(causal_lm)):
        found += _sublayers(index, layer)
    return found


def is_recurrent(causal_lm: PreTrainedModel) -> bool:
    """Whether some layer carries a state from token to token (Mamba-2, linear attention, short convolution)."""
    return any(sublayer.kind == RECURRENT for sublayer in sublayers_of(causal_lm))


def _sublayers(index: int, layer: nn.Module) -> list[Sublayer]:
    children = {name: module for name, module in layer.named_children() if module is not None}
    if "mixer" in children and "norm" in children:  # Nemotron-H: one sublayer a layer
        kind = SOLE.get(str(getattr(layer, "block_type", None)))
        if kind is None:
            raise _unknown(layer)
        return [Sublayer(index, 0, kind, children["norm"], (children["mixer"],), (children["mixer"],))]
    norms = {name for name, module in children.items() if "norm" in type(module).__name__.lower()}
    arrangement = next((a for a in ARRANGEMENTS if {n for n in a if n} == norms), None)
    mixers = {name: kind for name, kind in MIXERS.items() if name in children}
    feeds = {name: kind for name, kind in FEEDS.items() if name in children}
    if arrangement is None or not mixers or not feeds:
        raise _unknown(layer)
    parts = (
        (0, mixers, arrangement.mixer, arrangement.behind_mixer),
        (1, feeds, arrangement.feed, arrangement.behind_feed),
    )
    found = []
    for slot, names, before, behind in parts:
        branches = tuple(children[name] for name in names)
        kind = RECURRENT if RECURRENT in names.values() else next(iter(names.values()))
        gated = (children[behind],) if behind else branches
        found.append(Sublayer(index, slot, kind, children[before] if before else None, branches, gated))
    return found


def _unknown(layer: nn.Module) -> UserError:
    names = ", ".join(name for name, _ in layer.named_children())
    return UserError(
        f"TwoTower does not know how {type(layer).__name__} adds to its residual stream (it holds {names}): "
        "describe its norms in model/two_tower/sublayers.py."
    )
