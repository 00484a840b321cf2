"""What a reveal policy sees, how it is registered, and the check that a request's parameters suit its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.config import DecodeConfig, nearest_key
from model.errors import UserError

PARAMETERS = ("threshold", "steps", "factor", "gamma", "budget")  # fields of DecodeConfig that belong to a policy
FEATURES = ("entropy", "gap")  # what can be computed for a slot beside the confidence, see RevealInputs


@dataclass(frozen=True)
class RevealInputs:
    """R rows by K slots of their working blocks.

    candidates: bool [R, K], the masked slots of each row's active sub-block. confidence: float [R, K], the probability
    of the token chosen for a slot, meaningless where it is no candidate.
    steps_left: int64 [R], steps that the row's budget still grants this sub-block, this one included (at least 1).
    progress: float [R], the decided share of the working block, 0 to 1.
    parameters: float [R] each, the ones that the policy takes, `steps` aside (it is in steps_left).
    features: float [R, K] each, the ones that the policy needs, meaningless where there is no candidate. "entropy": of
    the slot's distribution, in nats; "gap": its largest logit over the second largest.
    """

    confidence: Tensor
    candidates: Tensor
    steps_left: Tensor
    progress: Tensor
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    features: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def ranked(self) -> Tensor:
        """Confidence with everything but candidates below all of them."""
        return self.confidence.masked_fill(~self.candidates, -1.0)

    def column(self, parameter: str) -> Tensor:
        """A parameter as [R, 1], to compare with slots."""
        return self.parameters[parameter][:, None]


Rule = Callable[[RevealInputs], Tensor]


@dataclass(frozen=True)
class Policy:
    """A registered rule. parameters: the ones it takes, with their defaults; needs: the features it looks at.

    at_most: upper bounds that hold for this policy only, beside those of DecodeConfig.
    """

    name: str
    rule: Rule
    needs: tuple[str, ...]
    parameters: Mapping[str, float | None]
    at_most: Mapping[str, float]

    def __call__(self, inputs: RevealInputs) -> Tensor:
        """What to reveal, bool [R, K]."""
        return self.rule(inputs)

    def value(self, decode: DecodeConfig, parameter: str) -> float:
        """The request's value of a parameter, or the policy's default."""
        given = decode.parameter(parameter)
        value = self.parameters[parameter] if given is None else given
        assert value is not None, f"{parameter} has no default: it is not read as a number"
        return float(value)


POLICIES: dict[str, Policy] = {}


def policy(
    name: str,
    *,
    needs: tuple[str, ...] = (),
    at_most: Mapping[str, float] | None = None,
    **parameters: float | None,
) -> Callable[[Rule], Policy]:
    """Register a reveal rule under the name that requests use; keywords are its parameters and their defaults."""
    assert set(needs) <= set(FEATURES), f"{name} needs what nobody computes: {needs}"
    assert set(parameters) <= set(PARAMETERS), f"{name} takes what no request can carry: {list(parameters)}"

    def register(rule: Rule) -> Policy:
        POLICIES[name] = Policy(name, rule, needs, parameters, at_most or {})
        return POLICIES[name]

    return register


def check_policy(decode: DecodeConfig) -> None:
    """Raises UserError, which names the field at fault first, for an unknown policy or a parameter it cannot use."""
    if decode.policy not in POLICIES:
        raise UserError(f"policy {decode.policy!r} is not known: {nearest_key(decode.policy, POLICIES)}")
    chosen = POLICIES[decode.policy]
    for name in PARAMETERS:
        value = decode.parameter(name)
        if value is not None and name not in chosen.parameters:
            raise UserError(f"{name} {value} has no effect with policy {chosen.name!r}: leave it out.")
        if value is not None and value > chosen.at_most.get(name, value):
            raise UserError(
                f"{name} must be at most {chosen.at_most[name]:g} with policy {chosen.name!r}, not {value:g}."
            )


# ------------------------------------------------------------------------------------------------- what rules share
def first(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """The `count` [R] candidates of each row with the highest score [R, K], the leftmost of equals; bool [R, K]."""
    order = score.masked_fill(~candidates, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return candidates & (rank < count[:, None])


def scheduled(inputs: RevealInputs) -> Tensor:
    """ceil(candidates / steps left), int64 [R]: what keeps to the row's budget of steps."""
    masked = inputs.candidates.sum(1)
    return (masked + inputs.steps_left - 1) // inputs.steps_left


def steps_of_sub_block(steps: int, index: int, sub_blocks: int) -> int:
    """How many of a block's `steps` fall to sub-block `index` of `sub_blocks`: evenly shared, at least one."""
    return max(1, steps * (index + 1) // sub_blocks - steps * index // sub_blocks)
