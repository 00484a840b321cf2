r"""From logits to one candidate token per slot and the confidence in it. N slots of any rows, V vocabulary.

    logits -> edits (penalties, biases) -> mask token banned -> the deciding distribution -> token, confidence, ...
                                                                \-> temperature, top-k, top-p, min-p -> a draw

A draw inverts the slot's cumulative distribution at one uniform number, which is a hash of (seed, position, step). So
a request draws the same tokens alone, in any batch and after any interruption. Confidence, entropy, gap and
log-probabilities are those of the deciding distribution, in float32 at least: what a request bans or penalises counts
less in them too, its temperature and cuts do not show.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.kernels.peaks import peaks

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 and the two multipliers of splitmix64, as signed 64-bit numbers
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
PENALTIES = (1e-25, 1e25)  # no logit times or over one of these overflows float32; beyond them nothing changes any more


@dataclass(frozen=True)
class Draws:
    """M slots that are drawn at random. slot: int64 [M], which of the N logits; the other tensors [M] go with it."""

    slot: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    step: Tensor


@dataclass(frozen=True)
class Edits:
    """E logits that are changed before anything is chosen, no (slot, token) twice; tensors [E].

    The logit of `token` at `slot` is divided by `repetition` if it is above 0, else multiplied by it (CTRL); then
    `shift` is added. slot, token: int64; the others float64.
    """

    slot: Tensor
    token: Tensor
    repetition: Tensor
    shift: Tensor


@dataclass(frozen=True)
class SlotSampling:
    """How N slots get their tokens: greedily, unless among `plain` draws or `cut` ones (top-k, top-p, min-p).

    banned: int64, the slots whose distribution must not hold `banned_token_id`, the mask token (AR rows keep it: they
    equal `generate`).
    """

    banned: Tensor
    banned_token_id: int | None
    plain: Draws | None = None
    cut: Draws | None = None
    edits: Edits | None = None


@dataclass(frozen=True)
class Chosen:
    """What was chosen for N slots, and the distributions it was chosen from.

    token: int64 [N]. logits: [N, V] of the deciding distribution, float32 or float64; normaliser: its logsumexp [N].
    A slot whose logits hold NaN or +inf has the confidence NaN.
    """

    token: Tensor
    logits: Tensor
    normaliser: Tensor

    @property
    def logprob(self) -> Tensor:
        """Natural logarithm of each chosen token's probability, [N]."""
        logprob = self.logits.gather(-1, self.token[:, None])[:, 0] - self.normaliser
        return logprob.masked_fill(~self.normaliser.isfinite(), torch.nan)  # a draw may miss the token that is +inf

    @property
    def confidence(self) -> Tensor:
        """Probability of each chosen token, [N]."""
        return self.logprob.exp()

    def entropy(self, slot: Tensor) -> Tensor:
        """Entropy in nats of the distributions at `slot`, int64 [M]; [M]."""
        return torch.special.entr((self.logits[slot] - self.normaliser[slot, None]).exp_()).sum(-1)

    def gap(self, slot: Tensor) -> Tensor:
        """The largest logit over the second largest at `slot`, int64 [M]; [M]."""
        largest = self.logits[slot].topk(2, dim=-1).values
        return largest[:, 0] - largest[:, 1]

    def top_logprobs(self, slot: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n most likely tokens int64 [M, n] at `slot` and their log-probabilities [M, n], best first."""
        values, tokens = self.logits[slot].topk(min(n, self.logits.shape[1]), dim=-1)
        return tokens, values - self.normaliser[slot, None]


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


def choose(logits: Tensor, how: SlotSampling) -> Chosen:
    """Candidate tokens from logits [N, V], which may be changed in place."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if how.edits is not None:
        _edit(logits, how.edits)
    if how.banned_token_id is not None:
        logits[how.banned, how.banned_token_id] = -torch.inf
    token, normaliser = peaks(logits)
    if how.plain is not None:
        token[how.plain.slot] = _draw_plain(logits[how.plain.slot], how.plain)
    if how.cut is not None:
        token[how.cut.slot] = _draw_cut(logits[how.cut.slot], how.cut)
    return Chosen(token, logits, normaliser)


def _edit(logits: Tensor, edits: Edits) -> None:
    value = logits[edits.slot, edits.token]
    repetition = edits.repetition.clamp(*PENALTIES).to(value.dtype)
    shift = edits.shift.to(value.dtype)
    logits[edits.slot, edits.token] = torch.where(value > 0, value / repetition, value * repetition) + shift


def _tempered(logits: Tensor, how: Draws) -> Tensor:
    """Logits [M, V] over temperature, the largest at 0: no temperature overflows."""
    return (logits - logits.amax(-1, keepdim=True)) / how.temperature[:, None].to(logits.dtype)


def invert(weight: Tensor, point: Tensor) -> Tensor:
    """Index int64 [M] where the cumulative weight [M, V], float64 and not negative, passes `point` [M] in [0, 1)."""
    cumulative = weight.cumsum(-1)
    found = torch.searchsorted(cumulative, point[:, None] * cumulative[:, -1:], right=True)
    return found.clamp_(max=weight.shape[1] - 1)[:, 0]


def _noise(how: Draws) -> Tensor:
    return uniform(how.seed, how.position, how.step)


def _draw_plain(logits: Tensor, how: Draws) -> Tensor:
    return invert(_tempered(logits, how).double().exp_(), _noise(how))


def _draw_cut(logits: Tensor, how: Draws) -> Tensor:
    weight, order = _cut(logits, how)
    return order.gather(-1, invert(weight, _noise(how))[:, None])[:, 0]


def distributions(logits: Tensor, how: Draws, *, cuts: bool) -> Tensor:
    """What `how` draws from, float32 [M, V] in the vocabulary's order; logits [M, V]. cuts: as `SlotSampling.cut`."""
    if not cuts:
        return _tempered(logits, how).double().softmax(-1).float()
    weight, order = _cut(logits, how)
    weight /= weight.sum(-1, keepdim=True)
    return torch.zeros_like(weight).scatter_(-1, order, weight).float()


def _cut(logits: Tensor, how: Draws) -> tuple[Tensor, Tensor]:
    """Weights float64 [M, V], best first, 0 for what is cut, and the tokens they belong to.

    In the order of transformers' `generate`: temperature, top-k, top-p (the fewest tokens that reach it), min-p (tokens
    at least `min_p` times as likely as the best).
    """
    ranked, order = _tempered(logits, how).sort(dim=-1, descending=True, stable=True)
    weight = ranked.double().exp_()
    top_k = torch.where(how.top_k > 0, how.top_k, weight.shape[1])
    weight.masked_fill_(torch.arange(weight.shape[1], device=weight.device) >= top_k[:, None], 0.0)
    before = weight.cumsum(-1) - weight
    weight.masked_fill_(before >= how.top_p[:, None] * weight.sum(-1, keepdim=True), 0.0)
    return weight.masked_fill_(weight < how.min_p[:, None] * weight[:, :1], 0.0), order
