"""One copy of the weights: what turns the frozen context tower into the denoiser, for some tokens of a forward.

    a linear layer      y = W x  +  (alpha / rank) B A x     at noisy tokens only
    the mask's embedding a vector of its own                  at noisy tokens only

peft makes the factors A and B (its targets, its starting values: B = 0), and its layers are taken out again: hooks add
the second term, so the model keeps its modules, its names and its state dict, and nothing of the base is held twice.
Only the factors and the vector are parameters here. Saved by their names in the model, they are a peft adapter.

`all-linear` means every linear layer inside the decoder layers' branches, but not
  - Mamba's last projection, which its kernels multiply with behind the module's back;
  - in a model of experts, a feed-forward layer named as experts' layers are: peft would take the experts for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from model.adapters import ALL_LINEAR, LoraSettings, begin_adapter
from model.errors import UserError
from model.two_tower.sublayers import ATTENTION, RECURRENT, Sublayer, decoder_layers, sublayers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_RANK = 16
KEY = "lora"
EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def default_settings(rank: int = DEFAULT_RANK) -> LoraSettings:
    """Every linear layer, alpha twice the rank."""
    return LoraSettings(rank, 2.0 * rank, ALL_LINEAR)


class Factors(nn.Module):
    """The low-rank term of one linear layer, scale * B A x; names as in a saved adapter."""

    def __init__(self, down: nn.Module, up: nn.Module, scale: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B, self.scale = down, up, scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lora_B(self.lora_A(x)) * self.scale
        return out


class MaskEmbedding(nn.Module):
    """The vector that a masked slot has for an embedding, as the embedding module returns it."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.vector = nn.Parameter(start.detach().clone())

    def forward(self, embedded: Tensor, masks: Tensor) -> Tensor:
        """embedded [R, n, H] with the vector at `masks`, bool [R, n]."""
        return torch.where(masks[..., None], self.vector.to(embedded.dtype), embedded)


class TokenAdapter(nn.Module):
    """Adapter layers and the mask's embedding over a model that stays as it is; they act between `on` and `off`.

    Hooks stay on the model's modules; while they are off a forward is the base model's.
    """

    def __init__(self, causal_lm: PreTrainedModel, settings: LoraSettings, mask_token_id: int) -> None:
        """mask_token_id: may be the first one outside the vocabulary. Draws from torch's generator.

        Raises UserError for targets that are no linear modules of the model or do not see every token.
        """
        super().__init__()
        self.settings = settings
        peft_model, layers = _peft_layers(causal_lm, settings)
        self.config = peft_model.peft_config["default"]
        self.factors = nn.Module()
        for path, layer in layers.items():
            scale = float(layer.scaling["default"])
            _place(self.factors, path, Factors(layer.lora_A["default"], layer.lora_B["default"], scale))
        peft_model.unload()
        self.targets = {path: causal_lm.get_submodule(path) for path in layers}  # a dict: not registered
        embedding = causal_lm.get_input_embeddings()
        self.mask = MaskEmbedding(_starting_vector(embedding, mask_token_id))
        self.active = False
        self.where: Tensor | None = None
        self.masks: Tensor | None = None
        for path, target in self.targets.items():
            target.register_forward_hook(self._adding(self.factors.get_submodule(path)))
        embedding.register_forward_hook(self._embedding)

    def on(self, masks: Tensor, noisy: Tensor | None = None) -> None:
        """For the next forwards. masks: bool [R, n], the masked slots. noisy: bool [R, n]; None is every token."""
        self.active, self.masks = True, masks
        self.where = None if noisy is None else noisy.flatten().nonzero()[:, 0]

    def off(self) -> None:
        """The base model again."""
        self.active, self.where, self.masks = False, None, None

    def _adding(self, factors: nn.Module) -> Any:
        def add(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
            if not self.active:
                return None
            if self.where is None:
                return out + factors(args[0])
            term = factors(args[0].flatten(0, -2)[self.where])
            return out.flatten(0, -2).index_add(0, self.where, term).view_as(out)

        return add

    def _embedding(self, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        if not self.active or self.masks is None:
            return None
        replaced: Tensor = self.mask(out, self.masks)
        return replaced

    @contextmanager
    def seeing_every_token(self, tokens: int) -> Iterator[None]:
        """Raises UserError where a target does not run on all `tokens` tokens of the forward inside, or not at all."""
        seen: dict[str, int] = dict.fromkeys(self.targets, 0)

        def count(path: str) -> Any:
            def hook(module: nn.Module, args: Any, out: Tensor) -> None:
                seen[path] = args[0].numel() // args[0].shape[-1]

            return hook

        handles = [target.register_forward_hook(count(path)) for path, target in self.targets.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        partial = next((path for path, n in seen.items() if n != tokens), None)
        if partial is not None:
            raise UserError(
                f"{KEY}.targets: {partial} does not run on every token as a module, so no token can be told apart "
                "there: name others."
            )


def linear_layers(causal_lm: PreTrainedModel) -> list[str]:
    """Names in the model of the linear layers that `all-linear` stands for."""
    names = {module: name for name, module in causal_lm.named_modules()}
    experts = any(parameter.dim() == 3 and "expert" in name for name, parameter in causal_lm.named_parameters())
    found = []
    for sublayer in sublayers_of(causal_lm):
        for branch in sublayer.branches:
            for name, module in branch.named_modules():
                if isinstance(module, nn.Linear | Conv1D) and not _left_out(sublayer, branch, name, experts):
                    found.append(names[module])
    return found


def _left_out(sublayer: Sublayer, branch: nn.Module, name: str, experts: bool) -> bool:
    if sublayer.kind == RECURRENT:
        return name == "out_proj" and hasattr(branch, "A_log")
    return experts and sublayer.kind != ATTENTION and name.rpartition(".")[2] in EXPERT_NAMES


def _peft_layers(causal_lm: PreTrainedModel, settings: LoraSettings) -> tuple[Any, dict[str, Any]]:
    """peft's model around this one, and its layers by the name of the linear module that each holds."""
    name = type(causal_lm).__name__
    if settings.targets == ALL_LINEAR:
        settings = replace(settings, targets=tuple(linear_layers(causal_lm)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that it found out how GPT-2 stores its matrices
        peft_model = begin_adapter(causal_lm, name, settings, KEY)
    layers = {path: module for path, module in causal_lm.named_modules() if hasattr(module, "lora_A")}
    inside = {id(module) for layer in decoder_layers(causal_lm) for module in layer.modules()}
    for path, layer in layers.items():
        if id(layer) not in inside or not isinstance(layer.base_layer, nn.Linear | Conv1D):
            peft_model.unload()
            raise UserError(f"{KEY}.targets: {path} is no linear layer inside a decoder layer, name others.")
    return peft_model, layers


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register a module under a dotted name."""
    *parents, last = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(last, module)


def _starting_vector(embedding: nn.Module, mask_token_id: int) -> Tensor:
    """What the base model embeds the mask as; of a mask outside the vocabulary the mean of all embeddings."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        if mask_token_id < len(weight):
            own: Tensor = embedding(torch.tensor([mask_token_id], device=weight.device))[0]
            return own
        parts = torch.arange(len(weight), device=weight.device).split(4096)
        total = torch.stack([embedding(part).float().sum(0) for part in parts]).sum(0)
        return (total / len(weight)).to(weight.dtype)
