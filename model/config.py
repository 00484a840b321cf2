"""The two small frozen nouns every room shares: how a model was adapted, and how it is asked to decode.

`BlockDiffusionConfig` lives in a model folder's config.json under "block_diffusion"; `DecodeConfig` is what a
request may choose. Both validate themselves and refuse unknown keys, naming the nearest real one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import UserError

CONFIG_KEY = "block_diffusion"
TWO_TOWER = "two_tower"
METHODS = ("fast_dllm_v2", TWO_TOWER)
MODES = ("diffusion", "ar", "lossless", "auto")
REFRESHES = ("always", "sub_block", "every:N")
FUSED = ("off", "masked_head", "speculative")
FUSED_DEFAULT = "speculative"  # token for token as "off", in fewer forwards
NEVER = 1 << 30
POLICY, TWO_TOWER_POLICY = "threshold", "budgeted"  # where nobody names one


def nearest_key(name: str, known: Any) -> str:
    """A hint for a misspelt key: ``, did you mean 'x'?`` or the list of keys when none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class BlockDiffusionConfig:
    """How a checkpoint was adapted. block_size K and sub_block_size S in tokens; S divides K.

    method "two_tower": a second network writes the blocks (`model.two_tower`), each as a whole, from the prompt's end
    on; it is read from two_tower.json, never from config.json.
    `trained_context_length`: longest document (tokens) seen in adaptation, None when not recorded.
    """

    block_size: int
    mask_token_id: int
    method: str = "fast_dllm_v2"
    sub_block_size: int = 8
    token_shift: bool = True
    trained_context_length: int | None = None

    def __post_init__(self) -> None:
        where = f"{CONFIG_KEY} in config.json"
        for name in ("block_size", "mask_token_id", "sub_block_size", "trained_context_length"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            optional = value is None and name == "trained_context_length"
            _check(whole or optional, f"{where}: {name} must be a whole number, not {value!r}.")
        _check(isinstance(self.token_shift, bool), f"{where}: token_shift must be true or false.")
        _check(self.block_size >= 1, f"{where}: block_size must be at least 1, not {self.block_size}.")
        _check(self.mask_token_id >= 0, f"{where}: mask_token_id must not be negative, not {self.mask_token_id}.")
        _check(self.method in METHODS, f"{where}: method {self.method!r} is not known; known: {', '.join(METHODS)}.")
        check_sub_block(self.sub_block_size, self.block_size)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockDiffusionConfig:
        """Read the object of config.json. Raises UserError for unknown keys or missing required ones."""
        _check(
            isinstance(values, Mapping), f"{CONFIG_KEY} in config.json must be an object, not {type(values).__name__}."
        )
        fields = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            _check(
                key in fields, f"{CONFIG_KEY} in config.json has the unknown key {key!r}: {nearest_key(key, fields)}"
            )
        for key in ("block_size", "mask_token_id"):
            _check(key in values, f"{CONFIG_KEY} in config.json lacks {key}.")
        alone = values.get("method") != TWO_TOWER
        _check(alone, f"{CONFIG_KEY} in config.json: a {TWO_TOWER} model is a folder with two_tower.json.")
        values = dict(values)
        if "sub_block_size" not in values and isinstance(values["block_size"], int):
            values["sub_block_size"] = default_sub_block(values["block_size"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def two_tower(self) -> bool:
        """Whether a second network writes the blocks."""
        return self.method == TWO_TOWER


def default_sub_block(block_size: int) -> int:
    """The published 8 where it divides the block, else the whole block."""
    return 8 if block_size % 8 == 0 else block_size


def check_sub_block(sub_block_size: int, block_size: int) -> None:
    """Raises UserError unless 1 <= sub_block_size <= block_size and it divides the block."""
    _check(
        sub_block_size >= 1 and block_size % sub_block_size == 0,
        f"sub_block_size {sub_block_size} does not divide block_size {block_size}: "
        f"choose one of {', '.join(str(n) for n in range(1, block_size + 1) if block_size % n == 0)}.",
    )


@dataclass(frozen=True)
class DecodeConfig:
    """How one request wants its blocks opened. None means the model's or the policy's default.

    mode: "diffusion" (blocks), "ar" (same weights, causal, token by token), "lossless" (AR mode's answer, from drafts
    written as blocks that AR mode verifies), or "auto", whichever of the first two the engine expects to answer sooner
    at its present load ("ar" for a model that was not adapted).
    Of a TwoTower model, blocks are the denoiser's, and AR mode is the context tower's alone.
    policy: a name in `model.decoding.policies.POLICIES`. Its parameters, each refused with a policy that does not take
    it (`check_policy`): threshold, a probability in (0, 1]; steps, denoising steps of a block; factor and budget, above
    0; gamma, a probability for `dimple` and `budgeted`, nats for `entropy`.
    refresh: when the whole block runs: "always" (exact); "sub_block", at the start of each sub-block only (the
    published sub-block cache, approximate); "every:N", also after N - 1 steps of it alone ("every:1" is "always").
    fused: whether a commit and the next block's first step share a forward: "off"; "speculative", with a guessed first
    slot, the step kept only if the commit agrees (token for token as "off"); "masked_head", with that slot masked.
    """

    mode: str = "diffusion"
    policy: str = POLICY
    threshold: float | None = None
    steps: int | None = None
    sub_block_size: int | None = None
    refresh: str = "always"
    factor: float | None = None
    gamma: float | None = None
    budget: float | None = None
    fused: str = FUSED_DEFAULT

    @property
    def refresh_every(self) -> int:
        """Steps from one forward of the whole block to the next, at most."""
        if self.refresh.startswith("every:"):
            count = self.refresh.removeprefix("every:")
            return int(count) if count.isascii() and count.isdecimal() and len(count) < 7 else 0
        return {"always": 1, "sub_block": NEVER}.get(self.refresh, 0)

    def __post_init__(self) -> None:
        _check(self.refresh_every >= 1, f"refresh must be one of {', '.join(REFRESHES)}, not {self.refresh!r}.")
        _check(self.fused in FUSED, f"fused must be one of {', '.join(FUSED)}, not {self.fused!r}.")
        _check(self.mode in MODES, f"mode must be one of {', '.join(MODES)}, not {self.mode!r}.")
        inside = self.threshold is None or 0.0 < self.threshold <= 1.0
        _check(inside, f"threshold must be above 0 and at most 1, not {self.threshold!r}.")
        for name, value in (("steps", self.steps), ("sub_block_size", self.sub_block_size)):
            _check(value is None or value >= 1, f"{name} must be at least 1, not {value!r}.")
        for name, bound in (("factor", self.factor), ("budget", self.budget)):
            positive = bound is None or 0.0 < bound < float("inf")
            _check(positive, f"{name} must be above 0 and finite, not {bound!r}.")
        finite = self.gamma is None or 0.0 <= self.gamma < float("inf")
        _check(finite, f"gamma must be 0 or more and finite, not {self.gamma!r}.")

    @classmethod
    def in_section(cls, *, adapted: bool, two_tower: bool, **values: Any) -> DecodeConfig:
        """From a job's or server's section `decode`, where None means what suits the model: whether it was adapted to
        write blocks, and whether as two towers. Raises UserError that names the key with its section."""
        mode = values.pop("mode") or ("diffusion" if adapted else "ar")
        policy = values.pop("policy") or (TWO_TOWER_POLICY if two_tower else POLICY)
        try:
            return cls(mode=mode, policy=policy, **values)
        except UserError as error:  # which begins with the field
            raise UserError(f"decode.{error}") from error

    def parameter(self, name: str) -> float | None:
        """The value of a policy's parameter, None where the policy's default holds."""
        values = {
            "threshold": self.threshold,
            "steps": self.steps,
            "factor": self.factor,
            "gamma": self.gamma,
            "budget": self.budget,
        }
        return values[name]
