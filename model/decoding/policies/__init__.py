"""Reveal policies: which masked slots of the active sub-blocks open in a step. Pure functions of [R, K] tensors.

registry   what a policy sees, how one is registered, which request parameters it takes
ranking    the most confident few: threshold, sequential, static, dimple, budgeted
certainty  how many slots are safe to open together: factor, frechet, entropy
early      all at once when the model has made up its mind: prophet

A policy sees all rows of a round that chose it and says what to reveal: at least one slot of every row that has a
candidate, never a slot that is none; the tests hold every registered policy to that. A new one is a function with
`@policy("name", ...)` in one of these files, or in a file that is imported here.
"""

from model.decoding.policies import certainty, early, ranking
from model.decoding.policies.registry import (
    PARAMETERS,
    POLICIES,
    Policy,
    RevealInputs,
    check_policy,
    policy,
    steps_of_sub_block,
)

__all__ = [
    "PARAMETERS",
    "POLICIES",
    "Policy",
    "RevealInputs",
    "certainty",
    "check_policy",
    "early",
    "policy",
    "ranking",
    "steps_of_sub_block",
]
