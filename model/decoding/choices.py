"""What a round decides: a token for every slot that has a logit, and which of them open. Rows share every operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.decoding.packing import Slots, Turn
from model.decoding.policies import POLICIES, RevealInputs
from model.decoding.sampling import Draws, SlotSampling, choose


@dataclass(frozen=True)
class Choices:
    """On the host, arrays [N] beside the round's `Slots`: token int64, confidence float64 (NaN: bad logits), opens."""

    token: np.ndarray
    confidence: np.ndarray
    opens: np.ndarray


def decide(turns: Sequence[Turn], slots: Slots, logits: Tensor, banned_token_id: int | None) -> Choices:
    """Choose tokens from logits [N, V] and ask the rows' policies; reads the device once.

    banned_token_id: the mask token, which diffusion rows never choose nor count in a confidence.
    """
    token, confidence = choose(logits, _sampling(turns, slots, banned_token_id, logits.device))
    opens = _opens(turns, slots, confidence)
    host = torch.stack([token.double(), confidence.double(), opens.double()]).cpu().numpy()
    return Choices(host[0].astype(np.int64), host[1], host[2].astype(bool))


def _sampling(turns: Sequence[Turn], slots: Slots, banned_token_id: int | None, device: torch.device) -> SlotSampling:
    asked = [turn.row.request.sampling for turn in turns]
    causal = np.array([turn.row.causal for turn in turns])
    plain = [i for i, s in enumerate(asked) if not s.greedy and not s.top_k and s.top_p == 1.0]
    cut = [i for i, s in enumerate(asked) if not s.greedy and (s.top_k or s.top_p < 1.0)]
    return SlotSampling(
        banned=torch.from_numpy(np.flatnonzero(~causal[slots.turn])).to(device),
        banned_token_id=banned_token_id,
        plain=_draws(turns, slots, plain, device) if plain else None,
        cut=_draws(turns, slots, cut, device) if cut else None,
    )


def _draws(turns: Sequence[Turn], slots: Slots, drawing: list[int], device: torch.device) -> Draws | None:
    """The draws of the slots whose turn is in `drawing`."""
    slot = np.flatnonzero(np.isin(slots.turn, drawing))
    if not len(slot):
        return None
    rows = [turns[i].row for i in slots.turn[slot]]
    asked = [row.request.sampling for row in rows]
    steps = np.array([turns[i].query.step for i in slots.turn[slot]], dtype=np.int64)

    def tensor(values: list[float] | list[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values)).to(device)

    return Draws(
        slot=tensor(slot),
        temperature=tensor([float(s.temperature) for s in asked]),
        top_p=tensor([float(s.top_p) for s in asked]),
        top_k=tensor([s.top_k for s in asked]),
        seed=tensor([s.seed for s in asked]),
        position=tensor(slots.position[slot]),
        step=tensor(np.where(slots.denoised[slot], steps, 0)),
    )


def _opens(turns: Sequence[Turn], slots: Slots, confidence: Tensor) -> Tensor:
    """Bool [N]: heads always, other slots as their row's policy says."""
    opens = torch.from_numpy(slots.head).to(confidence.device)
    denoised = np.flatnonzero(slots.denoised)
    names = np.array([turn.row.request.decode.policy for turn in turns])[slots.turn[denoised]]
    for name in np.unique(names):
        slot = denoised[names == name]
        where = torch.from_numpy(slot).to(confidence.device)
        opens[where] = _ask_policy(str(name), turns, slots, slot, confidence[where])
    return opens


def _ask_policy(name: str, turns: Sequence[Turn], slots: Slots, slot: np.ndarray, confidence: Tensor) -> Tensor:
    """Lay the slots [M] out as rows by block columns, ask, and read the answer back as bool [M]."""
    device = confidence.device
    members, line = np.unique(slots.turn[slot], return_inverse=True)
    rows = [turns[i].row for i in members]
    shape = (len(rows), max(row.block_size for row in rows))
    at = (torch.from_numpy(line).to(device), torch.from_numpy(slots.column[slot]).to(device))
    true = torch.ones((), dtype=torch.bool, device=device)
    inputs = RevealInputs(
        confidence=confidence.new_zeros(shape).index_put_(at, confidence),
        candidates=torch.zeros(shape, dtype=torch.bool, device=device).index_put_(at, true),
        threshold=torch.tensor([row.request.decode.threshold for row in rows], dtype=confidence.dtype, device=device),
        steps_left=torch.tensor([turns[i].query.steps_left for i in members], device=device),
    )
    return POLICIES[name](inputs)[at]
