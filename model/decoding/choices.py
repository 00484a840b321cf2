"""What a round decides: a token for every slot that has a logit, and which of them open. Rows share every operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from model.decoding.acceptance import ACCEPT, DRAFT, REPLACE, accept
from model.decoding.lossless import LosslessRow
from model.decoding.packing import NONE, Slots, Turn
from model.decoding.penalties import edits_of
from model.decoding.policies import POLICIES, Policy, RevealInputs
from model.decoding.requests import TokenLogprob
from model.decoding.row import Row
from model.decoding.sampling import Chosen, Draws, SlotSampling, choose, distributions, uniform

NO_CUT = 2**31  # beyond every vocabulary; a request's top_k may be any whole number


@dataclass(frozen=True)
class Choices:
    """On the host, arrays [N] beside the round's `Slots`: token int64, confidence float64 (NaN: bad logits), opens.

    logprobs: of the slots whose request asks for them, by slot. drafted_from: by turn, of rows that draw their drafts,
    the distributions [n, V] of the tokens drafted in this round.
    """

    token: np.ndarray
    confidence: np.ndarray
    opens: np.ndarray
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    drafted_from: Mapping[int, Tensor] = field(default_factory=dict)


def decide(turns: Sequence[Turn], slots: Slots, logits: Tensor, banned_token_id: int | None) -> Choices:
    """Choose tokens from logits [N, V] and ask the rows' policies; reads the device once, twice for log-probabilities.

    banned_token_id: the mask token, which diffusion rows never choose nor count in a confidence.
    """
    chosen = choose(logits, _sampling(turns, slots, banned_token_id, logits.device))
    drafted_from = _verify_draws(turns, slots, chosen)
    confidence = chosen.confidence
    opens = _opens(turns, slots, chosen, confidence)
    host = torch.stack([chosen.token.double(), confidence.double(), opens.double()]).cpu().numpy()
    token, opened = host[0].astype(np.int64), host[2].astype(bool)
    return Choices(token, host[1], opened, _logprobs(turns, slots, chosen), drafted_from)


# ------------------------------------------------------------------------------------------------- tokens
def _sampling(turns: Sequence[Turn], slots: Slots, banned_token_id: int | None, device: torch.device) -> SlotSampling:
    asked = [turn.row.request.sampling for turn in turns]
    causal = np.array([turn.row.causal for turn in turns])
    plain = [i for i, s in enumerate(asked) if not s.greedy and not s.cuts]
    cut = [i for i, s in enumerate(asked) if not s.greedy and s.cuts]
    return SlotSampling(
        banned=torch.from_numpy(np.flatnonzero(~causal[slots.turn] | slots.drafted)).to(device),
        banned_token_id=banned_token_id,
        plain=_draws(turns, slots, plain, device) if plain else None,
        cut=_draws(turns, slots, cut, device) if cut else None,
        edits=edits_of(turns, slots, device),
    )


def _draws(turns: Sequence[Turn], slots: Slots, drawing: list[int], device: torch.device) -> Draws | None:
    """The draws of the slots whose turn is in `drawing`."""
    slot = np.flatnonzero(np.isin(slots.turn, drawing))
    return _draws_at(turns, slots, slot, device) if len(slot) else None


def _draws_at(turns: Sequence[Turn], slots: Slots, slot: np.ndarray, device: torch.device) -> Draws:
    """The draws of these slots, int64 [M]."""
    rows = [turns[i].row for i in slots.turn[slot]]
    asked = [row.request.sampling for row in rows]
    steps = np.array([turns[i].query.step for i in slots.turn[slot]], dtype=np.int64)

    def tensor(values: list[float] | list[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values)).to(device)

    return Draws(
        slot=tensor(slot),
        temperature=tensor([float(s.temperature) for s in asked]),
        top_p=tensor([float(s.top_p) for s in asked]),
        top_k=tensor([min(s.top_k, NO_CUT) for s in asked]),
        min_p=tensor([float(s.min_p) for s in asked]),
        seed=tensor([s.seed for s in asked]),
        position=tensor(slots.position[slot]),
        step=tensor(np.where(slots.denoised[slot], steps, np.where(slots.drafted[slot], DRAFT, 0))),
    )


# ------------------------------------------------------------------------------------------------- drawn drafts
def _verify_draws(turns: Sequence[Turn], slots: Slots, chosen: Chosen) -> dict[int, Tensor]:
    """Of lossless rows that draw: the tokens of verified slots become what the acceptance rule leaves there, in place.

    Returns the distributions that this round's drafts were drawn from, by turn.
    """
    drafted_from: dict[int, Tensor] = {}
    for cuts in (False, True):
        members = [i for i, turn in enumerate(turns) if _draws_drafts(turn.row, cuts)]
        verified = [np.flatnonzero(slots.turn == i)[: turns[i].query.drafted] for i in members]
        drafted = [np.flatnonzero((slots.turn == i) & slots.drafted) for i in members]
        slot, begin = np.concatenate([NONE, *verified, *drafted]), sum(map(len, verified))
        if not len(slot):
            continue
        draws = _draws_at(turns, slots, slot, chosen.logits.device)
        seen = distributions(chosen.logits[draws.slot], draws, cuts=cuts)
        if begin:
            _accept([turns[i].row for i in members if turns[i].query.drafted], draws, seen[:begin], chosen)
        for index, part in zip(members, seen[begin:].split([len(part) for part in drafted]), strict=True):
            drafted_from[index] = part.clone()  # a view would keep the others alive
    return drafted_from


def _draws_drafts(row: Row, cuts: bool) -> bool:
    sampling = row.request.sampling
    return isinstance(row, LosslessRow) and not sampling.greedy and sampling.cuts == cuts


def _accept(rows: Sequence[Row], draws: Draws, p: Tensor, chosen: Chosen) -> None:
    """The first slots of `draws` are those of the rows' drafts; p: [n, V], what AR mode would draw from there."""
    drafts = [row.draft for row in rows if isinstance(row, LosslessRow)]
    q = torch.cat([draft.q for draft in drafts if draft.q is not None])
    token = torch.from_numpy(np.concatenate([draft.tokens for draft in drafts])).to(p.device)
    slot, seed, position = (values[: len(p)] for values in (draws.slot, draws.seed, draws.position))
    chance, point = (uniform(seed, position, torch.full_like(position, step)) for step in (ACCEPT, REPLACE))
    chosen.token[slot] = accept(p, q, token, chance, point)[1]


# ------------------------------------------------------------------------------------------------- reveals
def _opens(turns: Sequence[Turn], slots: Slots, chosen: Chosen, confidence: Tensor) -> Tensor:
    """Bool [N]: heads always, other slots as their row's policy says."""
    opens = torch.from_numpy(slots.head).to(confidence.device)
    denoised = np.flatnonzero(slots.denoised)
    names = np.array([turn.row.request.decode.policy for turn in turns])[slots.turn[denoised]]
    for name in np.unique(names):
        slot = denoised[names == name]
        where = torch.from_numpy(slot).to(confidence.device)
        opens[where] = _ask_policy(POLICIES[str(name)], turns, slots, slot, confidence[where], chosen)
    return opens


def _ask_policy(
    policy: Policy, turns: Sequence[Turn], slots: Slots, slot: np.ndarray, confidence: Tensor, chosen: Chosen
) -> Tensor:
    """Lay the slots [M] out as rows by block columns, ask, and read the answer back as bool [M]."""
    device = confidence.device
    members, line = np.unique(slots.turn[slot], return_inverse=True)
    rows = [turns[i].row for i in members]
    shape = (len(rows), max(row.block_size for row in rows))
    at = (torch.from_numpy(line).to(device), torch.from_numpy(slots.column[slot]).to(device))
    true = torch.ones((), dtype=torch.bool, device=device)

    def laid_out(values: Tensor) -> Tensor:
        return values.new_zeros(shape).index_put_(at, values)

    def of_rows(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=confidence.dtype, device=device)

    taken = [name for name in policy.parameters if name != "steps"]
    where = torch.from_numpy(slot).to(device)
    inputs = RevealInputs(
        confidence=laid_out(confidence),
        candidates=torch.zeros(shape, dtype=torch.bool, device=device).index_put_(at, true),
        steps_left=torch.tensor([turns[i].query.steps_left for i in members], device=device),
        progress=of_rows([turns[i].query.progress for i in members]),
        parameters={name: of_rows([policy.value(row.request.decode, name) for row in rows]) for name in taken},
        features={name: laid_out(_feature(name, chosen, where)) for name in policy.needs},
    )
    return policy(inputs)[at]


def _feature(name: str, chosen: Chosen, slot: Tensor) -> Tensor:
    """What a policy wants to know of slots [M] beside their confidence."""
    return chosen.entropy(slot) if name == "entropy" else chosen.gap(slot)


# ------------------------------------------------------------------------------------------------- log-probabilities
def _logprobs(turns: Sequence[Turn], slots: Slots, chosen: Chosen) -> dict[int, TokenLogprob]:
    """By slot, for those whose request asks; each request gets as many of the most likely tokens as it wants."""
    wanted = [turn.row.request.logprobs for turn in turns]
    asking = np.isin(slots.turn, [i for i, n in enumerate(wanted) if n is not None])
    slot = np.flatnonzero(asking & ~slots.drafted)
    if not len(slot):
        return {}
    counts = [wanted[i] or 0 for i in slots.turn[slot]]
    where = torch.from_numpy(slot).to(chosen.logits.device)
    tokens, values = chosen.top_logprobs(where, max(counts))
    host = torch.cat([chosen.logprob[where, None], tokens, values], dim=1).double().cpu().tolist()
    return {int(s): _token_logprob(line, n) for s, line, n in zip(slot, host, counts, strict=True)}


def _token_logprob(line: list[float], n: int) -> TokenLogprob:
    """From [logprob, tokens..., their logprobs...]; a banned token has no logarithm and is left out."""
    width = len(line) // 2  # n may exceed it where the vocabulary is smaller than what was asked
    n = min(n, width)
    top = zip(map(int, line[1 : 1 + n]), line[1 + width : 1 + width + n], strict=True)
    return TokenLogprob(line[0], tuple((token, value) for token, value in top if value > float("-inf")))
