"""From logits to one candidate token per slot and the confidence in it. N slots of any rows, V vocabulary.

A draw inverts the slot's cumulative distribution at one uniform number, which is a hash of (seed, position, step). So
a request draws the same tokens alone, in any batch and after any interruption. Confidence is the probability of the
chosen token before temperature, top-k and top-p, in float32 at least, with the mask token banned before the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 and the two multipliers of splitmix64, as signed 64-bit numbers
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


@dataclass(frozen=True)
class Draws:
    """M slots that are drawn at random. slot: int64 [M], which of the N logits; the other tensors [M] go with it."""

    slot: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    step: Tensor


@dataclass(frozen=True)
class SlotSampling:
    """How each of N slots gets its token: greedily, unless it is among `plain` or `cut` (with a top-k or top-p) draws.

    banned: int64, the slots whose distribution must not hold `banned_token_id`, the mask token (AR rows keep it: they
    equal `generate`).
    """

    banned: Tensor
    banned_token_id: int | None
    plain: Draws | None = None
    cut: Draws | None = None


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own shift copies the sign bit)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 arithmetic wraps as unsigned does."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniform(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64, one per (seed, position, step); int64 tensors of one shape."""
    x = _mix(seed + _GOLDEN)
    x = _mix(x ^ (position + 1) * _GOLDEN)
    x = _mix(x ^ (step + 1) * _MIX_2)
    return _shift(x, 11).double() * 2.0**-53


def choose(logits: Tensor, how: SlotSampling) -> tuple[Tensor, Tensor]:
    """Candidate tokens int64 [N] and confidences [N] (float32 or float64) from logits [N, V].

    A slot whose logits hold NaN or +inf gets confidence NaN.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if how.banned_token_id is not None:
        logits[how.banned, how.banned_token_id] = -torch.inf
    token = logits.argmax(-1)
    if how.plain is not None:
        token[how.plain.slot] = _draw_plain(logits[how.plain.slot], how.plain)
    if how.cut is not None:
        token[how.cut.slot] = _draw_cut(logits[how.cut.slot], how.cut)
    chosen = logits.gather(-1, token[:, None])[:, 0]
    return token, torch.exp(chosen - logits.logsumexp(-1))


def _tempered(logits: Tensor, how: Draws) -> Tensor:
    """Logits [M, V] over temperature, the largest at 0: no temperature overflows."""
    return (logits - logits.amax(-1, keepdim=True)) / how.temperature[:, None].to(logits.dtype)


def _invert(weight: Tensor, how: Draws) -> Tensor:
    """Index [M] where the cumulative weight passes the slot's uniform number; weight float64 [M, V], not negative."""
    cumulative = weight.cumsum(-1)
    point = uniform(how.seed, how.position, how.step)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).clamp_(max=weight.shape[1] - 1)


def _draw_plain(logits: Tensor, how: Draws) -> Tensor:
    return _invert(_tempered(logits, how).double().exp_(), how)[:, 0]


def _draw_cut(logits: Tensor, how: Draws) -> Tensor:
    """Temperature, then top-k, then top-p (the fewest tokens that reach it), then the draw among what is left."""
    ranked, order = _tempered(logits, how).sort(dim=-1, descending=True, stable=True)
    weight = ranked.double().exp_()
    top_k = torch.where(how.top_k > 0, how.top_k, weight.shape[1])
    weight.masked_fill_(torch.arange(weight.shape[1], device=weight.device) >= top_k[:, None], 0.0)
    before = weight.cumsum(-1) - weight
    weight.masked_fill_(before >= how.top_p[:, None] * weight.sum(-1, keepdim=True), 0.0)
    return order.gather(-1, _invert(weight, how))[:, 0]
