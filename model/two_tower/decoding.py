"""Decoding with both towers for one request or many: blocks (Algorithm 1), token by token (AR), and likelihoods.

    prompt -> context tower
    block:  canvas = S masks; up to T steps: denoise at t = masked share, reveal by the policy; then the context tower
            reads the block. Blocks begin right after the prompt. What is revealed never changes.

Every row has its own t, its own steps and its own end, whoever decodes beside it. Source: TwoTower (arXiv 2606.26493),
Algorithm 1. The service's engine is another way to run the same steps; this one is plain and needs no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.config import DecodeConfig
from model.decoding.policies import POLICIES, RevealInputs, check_policy
from model.decoding.requests import SamplingParams
from model.decoding.sampling import Chosen, Draws, SlotSampling, choose
from model.errors import UserError
from model.two_tower.reader import Reader, Stretch
from model.two_tower.towers import TwoTower

PUBLISHED_POLICY = DecodeConfig(policy="budgeted")  # gamma 0.8, as many steps as slots


@dataclass(frozen=True)
class TowerRequest:
    """A prompt to continue by at most `max_tokens` tokens; stop tokens end the answer and count as its last.

    decode: the reveal policy and its parameters; `steps` counts per block, by default one a slot. sampling:
    temperature, top_p, top_k, min_p and seed; penalties and biases are the engine's.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    decode: DecodeConfig = PUBLISHED_POLICY
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UserError("the prompt is empty: send some text, or begin with the model's bos token.")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, not {self.max_tokens}.")
        if self.sampling.edits:
            raise UserError("penalties and logit_bias are not known to this decoder: use the engine.")
        check_policy(self.decode)


@dataclass
class TowerAnswer:
    """token_ids: the answer. finish_reason: "stop" or "length". written: all that was decoded, in whole blocks.

    steps_per_block: denoising forwards of each block. trace: per block and step the (position, token, confidence) that
    were revealed. accepted: tokens that each round of lossless decoding kept. forwards: of this row, by kind.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: str = "length"
    written: list[int] = field(default_factory=list)
    steps_per_block: list[int] = field(default_factory=list)
    trace: list[list[list[tuple[int, int, float]]]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    forwards: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "denoise": 0, "commit": 0})


@dataclass(eq=False)
class Writing:
    """A row at work: what was asked, what the context tower holds, the canvas, and the answer so far."""

    request: TowerRequest
    stretch: Stretch
    canvas: Tensor  # int64 [S], the mask token where masked
    masked: Tensor  # bool [S]
    answer: TowerAnswer = field(default_factory=TowerAnswer)
    step: int = 0

    @property
    def done(self) -> bool:
        return bool(self.answer.token_ids)

    def begin_block(self, mask_token_id: int) -> None:
        """A canvas of masks behind what the context tower holds."""
        self.canvas = torch.full_like(self.canvas, mask_token_id)
        self.masked = torch.ones_like(self.masked)
        self.step = 0

    def write(self, tokens: list[int]) -> None:
        """Take decided tokens, and end where a stop token or the budget says so."""
        first = len(self.answer.written)
        self.answer.written += tokens
        for index, token in enumerate(tokens, start=first + 1):
            if token in self.request.stop_token_ids or index == self.request.max_tokens:
                self.answer.finish_reason = "stop" if token in self.request.stop_token_ids else "length"
                self.answer.token_ids = tuple(self.answer.written[:index])
                return


def open_rows(towers: TwoTower, requests: Sequence[TowerRequest]) -> tuple[Reader, list[Writing]]:
    """A reader with room for all requests, and their rows, with the prompts read. Raises UserError for bad prompts."""
    size, vocabulary = towers.config.block_size, towers.context.causal_lm.get_input_embeddings().num_embeddings
    for request in requests:
        outside = [token for token in request.prompt_ids if not 0 <= token < vocabulary]
        if outside:
            raise UserError(f"the prompt holds the token id {outside[0]}, outside the vocabulary of {vocabulary}.")
    longest = max((len(r.prompt_ids) + r.max_tokens for r in requests), default=0)
    reader = Reader(towers, tokens=longest + 2 * size, rows=max(len(requests), 1))
    rows = []
    for request in requests:
        stretch = Stretch()
        reader.extend([stretch], torch.tensor([request.prompt_ids]))
        row = Writing(request, stretch, torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool))
        row.answer.forwards["prefill"] += 1
        row.begin_block(towers.config.mask_token_id)
        rows.append(row)
    return reader, rows


# ------------------------------------------------------------------------------------------------- blocks
def write_blocks(towers: TwoTower, requests: Sequence[TowerRequest]) -> list[TowerAnswer]:
    """Block diffusion (Algorithm 1): all requests together, each at its own pace."""
    reader, rows = open_rows(towers, requests)
    begin_shifted(towers, rows)
    while working := [row for row in rows if not row.done]:
        denoise_once(reader, [row for row in working if row.masked.any()])
        full = [row for row in working if not row.masked.any()]
        for row in full:
            row.answer.steps_per_block.append(row.step)
            row.write(row.canvas.tolist())
        going_on = [row for row in full if not row.done]
        if going_on:
            reader.extend([row.stretch for row in going_on], torch.stack([row.canvas for row in going_on]))
        for row in going_on:
            row.answer.forwards["commit"] += 1
            row.begin_block(towers.config.mask_token_id)
        begin_shifted(towers, going_on)
    return [row.answer for row in rows]


def begin_shifted(towers: TwoTower, rows: Sequence[Writing]) -> None:
    """Where the denoiser has a token shift, the context tower's last logits decide the first slot of a canvas."""
    if not towers.config.token_shift or not rows:
        return
    for row, token in zip(rows, next_tokens(rows, banned=towers.config.mask_token_id), strict=True):
        row.canvas[0], row.masked[0] = token, False
        if token in row.request.stop_token_ids or len(row.answer.written) + 1 == row.request.max_tokens:
            row.write([token])


def denoise_once(reader: Reader, rows: Sequence[Writing]) -> Tensor | None:
    """One denoising step of every row's canvas. Returns the logits [R, S, V] that it was decided from."""
    if not rows:
        return None
    masked = torch.stack([row.masked for row in rows])
    size = masked.shape[1]
    times = masked.sum(1).double() / size
    logits = reader.denoise([row.stretch for row in rows], torch.stack([row.canvas for row in rows]), times).cpu()
    if reader.towers.config.token_shift:
        logits = logits.roll(1, 1)  # of the first slot, which is known, the last one's
    chosen = choose(logits.flatten(0, 1).clone(), _sampling(reader.towers, rows, size))
    token, confidence = chosen.token.view(-1, size), chosen.confidence.view(-1, size)
    opened = _opened(rows, masked, confidence, chosen)
    for index, row in enumerate(rows):
        if not row.step:
            row.answer.trace.append([])
        _reveal(row, opened[index], token[index], confidence[index])
    return logits


def _reveal(row: Writing, opened: Tensor, token: Tensor, confidence: Tensor) -> None:
    slots = opened.nonzero()[:, 0].tolist()
    first = row.stretch.length
    row.answer.trace[-1].append([(first + s, int(token[s]), float(confidence[s])) for s in slots])
    row.canvas = torch.where(opened, token, row.canvas)
    row.masked = row.masked & ~opened
    row.step += 1
    row.answer.forwards["denoise"] += 1


def _opened(rows: Sequence[Writing], masked: Tensor, confidence: Tensor, chosen: Chosen) -> Tensor:
    """What each row's policy opens, bool [R, S]; rows that share a policy share the call."""
    opened = torch.zeros_like(masked)
    size = masked.shape[1]
    slots = torch.arange(masked.numel()).view_as(masked)
    for name in sorted({row.request.decode.policy for row in rows}):
        lines = torch.tensor([i for i, row in enumerate(rows) if row.request.decode.policy == name])
        of_policy = [rows[i].request.decode for i in lines]
        policy = POLICIES[name]
        steps = [(d.steps or size) - rows[i].step for d, i in zip(of_policy, lines, strict=True)]
        features = {"entropy": chosen.entropy, "gap": chosen.gap}
        inputs = RevealInputs(
            confidence=confidence[lines],
            candidates=masked[lines],
            steps_left=torch.tensor(steps).clamp(min=1),
            progress=1 - masked[lines].to(confidence.dtype).mean(1),
            parameters={
                key: torch.tensor([policy.value(d, key) for d in of_policy], dtype=confidence.dtype)
                for key in policy.parameters
                if key != "steps"
            },
            features={need: features[need](slots[lines].flatten()).view(-1, size) for need in policy.needs},
        )
        opened[lines] = policy(inputs)
    return opened


def _sampling(towers: TwoTower, rows: Sequence[Writing], size: int) -> SlotSampling:
    """Slots of a canvas: the mask token banned, draws keyed by the request's seed, the position and the step."""
    slots = torch.arange(len(rows) * size)
    positions = torch.cat([row.stretch.length + torch.arange(size) for row in rows])
    steps = torch.tensor([row.step for row in rows]).repeat_interleave(size)
    return sampling_of([row.request.sampling for row in rows], size, slots, positions, steps).banning(
        slots, towers.config.mask_token_id
    )


@dataclass(frozen=True)
class _Draws:
    """The draws of some rows' slots, still without a banned token."""

    plain: Draws | None
    cut: Draws | None

    def banning(self, slots: Tensor, token: int | None) -> SlotSampling:
        return SlotSampling(banned=slots, banned_token_id=token, plain=self.plain, cut=self.cut)


def sampling_of(
    asked: Sequence[SamplingParams], per_row: int, slots: Tensor, positions: Tensor, steps: Tensor
) -> _Draws:
    """How slots int64 [R * per_row] are drawn; positions and steps go with them."""
    row = torch.arange(len(asked)).repeat_interleave(per_row)
    drawing = torch.tensor([not s.greedy for s in asked], dtype=torch.bool)[row]
    cutting = torch.tensor([s.cuts for s in asked], dtype=torch.bool)[row]

    def draws(which: Tensor) -> Draws | None:
        if not which.any():
            return None
        mine = [asked[i] for i in row[which]]
        return Draws(
            slot=slots[which],
            temperature=torch.tensor([float(s.temperature) for s in mine]),
            top_p=torch.tensor([float(s.top_p) for s in mine]),
            top_k=torch.tensor([min(s.top_k, 2**31) for s in mine]),
            min_p=torch.tensor([float(s.min_p) for s in mine]),
            seed=torch.tensor([s.seed for s in mine]),
            position=positions[which],
            step=steps[which],
        )

    return _Draws(draws(drawing & ~cutting), draws(drawing & cutting))


# ------------------------------------------------------------------------------------------------- token by token
def write_tokens(towers: TwoTower, requests: Sequence[TowerRequest]) -> list[TowerAnswer]:
    """AR mode: the context tower alone; the denoiser may be absent."""
    reader, rows = open_rows(towers, requests)
    while working := [row for row in rows if not row.done]:
        tokens = next_tokens(working)
        for row, token in zip(working, tokens, strict=True):
            row.write([token])
        going_on = [(row, token) for row, token in zip(working, tokens, strict=True) if not row.done]
        if going_on:
            reader.extend([row.stretch for row, _ in going_on], torch.tensor([[token] for _, token in going_on]))
        for row, _ in going_on:
            row.answer.forwards["commit"] += 1
    return [row.answer for row in rows]


def next_tokens(rows: Sequence[Writing], banned: int | None = None) -> list[int]:
    """The token that AR decoding writes next in each row, from the context tower's last logits; never `banned`, the
    mask token, where it stands in a canvas."""
    logits = torch.stack([row.stretch.logits for row in rows if row.stretch.logits is not None]).cpu()
    if banned is not None and banned < logits.shape[1]:
        logits[:, banned] = -torch.inf
    asked, positions = [row.request.sampling for row in rows], torch.tensor([row.stretch.length for row in rows])
    tokens: list[int] = drawn(logits, asked, positions, step=0).tolist()
    return tokens


def drawn(logits: Tensor, asked: Sequence[SamplingParams], positions: Tensor, step: int) -> Tensor:
    """Tokens int64 [R] from logits [R, V], each by its own parameters and noise; positions int64 [R]."""
    slots = torch.arange(len(asked))
    draws = sampling_of(asked, 1, slots, positions, torch.full_like(slots, step))
    return choose(logits.clone(), draws.banning(slots[:0], None)).token


def log_likelihoods(towers: TwoTower, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """ln p(token | all before it), for every token of each sequence but its first; the denoiser may be absent."""
    found: list[list[float]] = []
    for ids in sequences:
        reader, stretch = Reader(towers, tokens=max(len(ids), 1), rows=1), Stretch()
        if len(ids) < 2:
            found.append([])
            continue
        logits = reader.extend([stretch], torch.tensor([list(ids)]), last_only=False).logits[0, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).cpu()
        found.append(wide.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return found
