"""How a TwoTower model was made: what stands in its folder's two_tower.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config import nearest_key
from model.errors import UserError
from model.two_tower.modulation import ORDERS

FILE = "two_tower.json"
OWN_CONTEXT = "context"  # the context tower lies in the folder itself
CLONE, LORA = "clone", "lora"
DENOISERS = (CLONE, LORA)


@dataclass(frozen=True)
class TwoTowerConfig:
    """block_size S in tokens; order: see `model.two_tower.modulation`. denoiser: "clone", weights of its own, or
    "lora", an adapter over the context tower's.

    token_shift: the denoiser's logits at a slot are of the slot behind it, as in the pretrained model; a block's first
    slot is then the context tower's to decide. False, as published: of the slot itself.

    context: where the context tower is, "context" for the folder's own copy, else a model folder, URI or Hub id, and
    context_revision the short hash that it must have. trained_context_length: longest document (tokens) seen in
    training, None when not recorded.
    """

    block_size: int
    mask_token_id: int
    order: str = "norm_first"
    method: str = "two_tower"
    context: str = OWN_CONTEXT
    context_revision: str | None = None
    trained_context_length: int | None = None
    denoiser: str = CLONE
    token_shift: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "mask_token_id", "trained_context_length"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole and not (value is None and name == "trained_context_length"):
                raise UserError(f"{FILE}: {name} must be a whole number, not {value!r}.")
        if self.block_size < 1:
            raise UserError(f"{FILE}: block_size must be at least 1, not {self.block_size}.")
        if self.mask_token_id < 0:
            raise UserError(f"{FILE}: mask_token_id must not be negative, not {self.mask_token_id}.")
        if self.order not in ORDERS:
            raise UserError(f"{FILE}: order must be one of {', '.join(ORDERS)}, not {self.order!r}.")
        if self.denoiser not in DENOISERS:
            raise UserError(f"{FILE}: denoiser must be one of {', '.join(DENOISERS)}, not {self.denoiser!r}.")
        if not isinstance(self.token_shift, bool):
            raise UserError(f"{FILE}: token_shift must be true or false, not {self.token_shift!r}.")
        if self.token_shift and self.block_size < 2:
            raise UserError(f"{FILE}: token_shift needs blocks of at least 2 tokens, not of {self.block_size}.")
        if self.method != "two_tower":
            raise UserError(f"{FILE}: method {self.method!r} is not two_tower: this is no TwoTower model.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TwoTowerConfig:
        """Read two_tower.json's object. Raises UserError for unknown keys or missing required ones."""
        if not isinstance(values, Mapping):
            raise UserError(f"{FILE} must hold an object, not {type(values).__name__}.")
        fields = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                raise UserError(f"{FILE} has the unknown key {key!r}: {nearest_key(key, fields)}")
        for key in ("block_size", "mask_token_id"):
            if key not in values:
                raise UserError(f"{FILE} lacks {key}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
