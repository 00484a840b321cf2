"""Lossless decoding: the denoiser drafts, the context tower verifies, and the output is the base model's own.

    round:  slot 0 is what AR decoding writes next (the context tower's last logits know it)
            the denoiser drafts the slots behind it, in a few steps; how many follows how much of the row's last drafts
            was kept
            one commit forward reads the draft and yields the AR logits of every slot
            the longest beginning that AR decoding would have written is kept, and the logit behind it opens the next

Greedy: token for token the base model's output, whatever is drafted. With a temperature each drafted token x is kept
with probability min(1, p(x) / q(x)), else replaced by a draw from max(0, p - q): the tokens are distributed exactly as
AR sampling's (Leviathan et al., arXiv 2211.17192). That needs x to be a draw from q that nothing drafted elsewhere has
steered, so only the last step of a draft draws; what earlier steps reveal is their most likely token (q is 1 there).
Recurrent states cannot be cropped: those before the round are kept, and a kept beginning is read again from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.decoding.acceptance import ACCEPT, DRAFT, REPLACE, accept
from model.decoding.requests import SamplingParams
from model.decoding.sampling import distributions, uniform
from model.decoding.tower_rows import draft_length
from model.two_tower.decoding import TowerAnswer, TowerRequest, Writing, drawn, next_tokens, open_rows, sampling_of
from model.two_tower.reader import Reader
from model.two_tower.recurrent import States
from model.two_tower.towers import TwoTower


@dataclass(frozen=True)
class Draft:
    """Proposals for the slots 1 .. n of a row's round: tokens int64 [n], and the distributions q [n, V] of their draws.

    q None: the tokens are no draws but fixed, which is what a greedy request needs.
    """

    tokens: Tensor
    q: Tensor | None = None


Drafter = Callable[[Reader, Writing, int, int], Draft]
"""(reader, a row, the token its canvas begins with, how many slots to draft behind it, at least 1) -> the draft."""


def write_lossless(
    towers: TwoTower, requests: Sequence[TowerRequest], *, steps: int = 1, drafter: Drafter | None = None
) -> list[TowerAnswer]:
    """Continue all requests with exactly the base model's output.

    steps: denoising forwards of a draft. drafter: another source of drafts than the denoiser; it may propose anything.
    """
    most = towers.config.block_size - 1
    reader, rows = open_rows(towers, requests)
    draft = drafter or denoiser_drafter(steps)
    for row in rows:
        row.write(next_tokens([row]))
    while working := [row for row in rows if not row.done]:
        left = [row.request.max_tokens - len(row.answer.written) - 1 for row in working]  # the last is never drafted
        counts = [min(draft_length(row.answer.accepted, most), n) for row, n in zip(working, left, strict=True)]
        heads = [row.answer.written[-1] for row in working]
        drafts = [
            draft(reader, row, head, count) if count else Draft(torch.zeros(0, dtype=torch.int64))
            for row, head, count in zip(working, heads, counts, strict=True)
        ]
        rounds = [torch.cat((torch.tensor([head]), one.tokens)) for head, one in zip(heads, drafts, strict=True)]
        proposals = pad_sequence(rounds, batch_first=True)
        reading = reader.read([row.stretch for row in working], proposals)
        for index, row in enumerate(working):
            kept, following = verify(row, drafts[index], reading.logits[index])
            _commit(reader, row, proposals[index], kept, reading.logits[index], reading.states[index])
            row.answer.accepted.append(kept)
            row.write([*proposals[index, 1:kept].tolist(), following])
    return [row.answer for row in rows]


def verify(row: Writing, draft: Draft, logits: Tensor) -> tuple[int, int]:
    """(tokens of the round that stand, slot 0 included; the token that follows them).

    logits: [n + 1, V] or more, the context tower's behind each token of the round.
    """
    count = len(draft.tokens)
    if row.request.sampling.greedy:
        written = logits.argmax(-1).tolist()
        wrong = [slot for slot in range(count) if int(draft.tokens[slot]) != written[slot]]
        kept = wrong[0] if wrong else count
        return kept + 1, written[kept]
    given = logits[: count + 1].cpu()
    p = target_distribution(given[:count], row.request.sampling)
    positions = row.stretch.length + 1 + torch.arange(count + 1)  # of slots 1 .. n, and behind them
    chance, point = (_noise(row, positions, step) for step in (ACCEPT, REPLACE))
    vocabulary = given.shape[1]
    for slot in range(count):
        token = int(draft.tokens[slot])
        q = one_hot(token, vocabulary) if draft.q is None else _fitted(draft.q[slot], vocabulary)
        known = token < vocabulary  # the denoiser's mask token may lie outside, and never stands
        at = torch.tensor([token if known else 0])
        one = chance[slot : slot + 1] if known else torch.tensor([torch.inf])
        stands, chosen = accept(p[slot : slot + 1], q[None], at, one, point[slot : slot + 1])
        if not bool(stands):
            return slot + 1, int(chosen)
    return count + 1, int(drawn(given[count:], [row.request.sampling], positions[count:], step=0))


def _noise(row: Writing, positions: Tensor, step: int) -> Tensor:
    """Uniform numbers [n] of the request's noise stream at positions int64 [n]."""
    return uniform(torch.full_like(positions, row.request.sampling.seed), positions, torch.full_like(positions, step))


def target_distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """What AR decoding draws from logits [n, V], float32 [n, V]: after temperature, top-k, top-p and min-p."""
    slots = torch.arange(len(logits))
    how = sampling_of([sampling], len(logits), slots, slots, slots)
    draws = how.cut if sampling.cuts else how.plain
    return logits[:0].float() if draws is None else distributions(logits, draws, cuts=sampling.cuts)


def one_hot(token: int, vocabulary: int) -> Tensor:
    """All weight on one token, none where it is outside the vocabulary."""
    q = torch.zeros(vocabulary)
    if token < vocabulary:
        q[token] = 1.0
    return q


def _fitted(q: Tensor, vocabulary: int) -> Tensor:
    """A denoiser may know tokens that the context tower's head does not (a mask token of its own): they have none."""
    q = q[:vocabulary]
    return torch.nn.functional.pad(q, (0, vocabulary - len(q)))


def _commit(reader: Reader, row: Writing, tokens: Tensor, kept: int, logits: Tensor, states: States) -> None:
    """The context tower keeps the first tokens of the round. Keys and values behind them are overwritten later.

    tokens, logits, states: what was read. A recurrent row that keeps less reads the kept ones again.
    """
    row.answer.forwards["commit"] += 1
    if kept < len(tokens) and row.stretch.states:
        row.answer.forwards["commit"] += 1
        reader.extend([row.stretch], tokens[None, :kept])
    else:
        reader.commit(row.stretch, kept, logits[kept - 1], states)


# ------------------------------------------------------------------------------------------------- drafts
def denoiser_drafter(steps: int) -> Drafter:
    """The denoiser's drafts in so many forwards: all but the last reveal their surest slots, the last all others."""

    def drafter(reader: Reader, row: Writing, head: int, count: int) -> Draft:
        mask, size = reader.towers.config.mask_token_id, reader.towers.config.block_size
        canvas = torch.full((size if reader.towers.writer().recurrent else count + 1,), mask)
        canvas[0] = head
        masked = torch.arange(len(canvas)) > 0
        fixed = torch.zeros_like(masked)
        for left in range(steps, 0, -1):
            unknown = 1 - (~masked).sum().double() / size  # of a whole block, which this is the beginning of
            logits = reader.denoise([row.stretch], canvas[None], unknown[None])[0].cpu()
            row.answer.forwards["denoise"] += 1
            if reader.towers.config.token_shift:
                logits = logits.roll(1, 0)
            logits[:, mask] = -torch.inf
            if left == 1:
                return _last_step(row, *(x[: count + 1] for x in (logits, canvas, fixed)))
            confidence, best = logits.double().softmax(-1).max(-1)
            surest = confidence.masked_fill(~masked, -1.0).argsort(descending=True)
            opens = torch.zeros_like(masked).scatter(0, surest[: -(-(len(canvas) - 1) // steps)], True) & masked
            canvas = torch.where(opens, best, canvas)
            masked, fixed = masked & ~opens, fixed | opens
            if not masked.any():
                return Draft(canvas[1 : count + 1], _points(canvas[1 : count + 1], logits.shape[-1]))
        raise AssertionError("a draft takes at least one step")

    return drafter


def _last_step(row: Writing, logits: Tensor, canvas: Tensor, fixed: Tensor) -> Draft:
    """What is still masked, all at once: independent draws where the request draws."""
    if row.request.sampling.greedy:
        return Draft(torch.where(fixed, canvas, logits.argmax(-1))[1:])
    q = target_distribution(logits, row.request.sampling)
    positions = row.stretch.length + torch.arange(len(canvas))
    own = drawn(logits, [row.request.sampling] * len(canvas), positions, step=DRAFT)
    tokens = torch.where(fixed, canvas, own)
    q = torch.where(fixed[:, None], _points(canvas, q.shape[1]), q)
    return Draft(tokens[1:], q[1:])


def _points(tokens: Tensor, vocabulary: int) -> Tensor:
    """Distributions [n, V] with all weight on the tokens [n]."""
    return torch.nn.functional.one_hot(tokens, vocabulary).float()
