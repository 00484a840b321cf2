"""A lock-step batch decoder, the published way to decode several rows, as a rival. B rows, K block, T query tokens.

    prefill   the whole batch up to the last whole block of the *shortest* prompt; what longer prompts hold beyond it
              passes through the block steps like everything else
    block     all rows stand in the same block [start, start + K). Sub-block by sub-block: steps of the whole batch
              until no unfinished row has a mask left in it, so the row that needs most steps holds up all others
    commit    one forward of the whole batch, whose keys and values are joined to the cache
    the end   rows that have finished stay in the batch until the last one has

Every forward builds its dense mask anew and copies the cache to join the step's keys and values to it. Weights, linear
layers and choice are the engine's. One kindness: the head runs on the slots of the active sub-block and, at a commit,
on the last one; the published code runs it on the whole block. Greedy only, policies `threshold` and `static`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.backbone import Backbone
from model.decoding import GenerationRequest
from model.decoding.policies import steps_of_sub_block
from model.errors import UserError
from pipelines.benches.engine.contestants import Answers


@dataclass
class JoinedCache:
    """Attention over keys and values [B, Hkv, past, D] a layer and those of the forward. keep: they stay."""

    block_size: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    keep: bool = False
    _bias: Tensor | None = None

    @property
    def length(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def begin(self, tokens: int, dtype: torch.dtype, device: torch.device, *, keep: bool) -> None:
        """A forward of `tokens` query tokens from a block's edge on: block-causal mask [T, past + T]."""
        past = self.length
        query = torch.arange(past, past + tokens, device=device)[:, None] // self.block_size
        key = torch.arange(past + tokens, device=device)[None] // self.block_size
        self._bias = torch.zeros(tokens, past + tokens, dtype=dtype, device=device).masked_fill_(
            key > query, -torch.inf
        )
        self.keep = keep

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """query [B, Hq, T, D], key and value [B, Hkv, T, D] -> [B, Hq, T, D]."""
        if layer < len(self.keys):
            key, value = torch.cat((self.keys[layer], key), 2), torch.cat((self.values[layer], value), 2)
        if self.keep:
            self.keys[layer : layer + 1], self.values[layer : layer + 1] = [key], [value]
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return scaled_dot_product_attention(query, key, value, attn_mask=self._bias, scale=scale)


@dataclass
class LockstepBatch:
    """B rows on the host: tokens int64 and masked bool [B, L]; prompt, limit (end of the answer), done, margin [B]."""

    tokens: np.ndarray
    masked: np.ndarray
    prompt: np.ndarray
    limit: np.ndarray
    done: np.ndarray
    margin: np.ndarray  # of confidence, the row's closest decision (only with `margins`)
    requests: Sequence[GenerationRequest]

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], block_size: int) -> LockstepBatch:
        prompt = np.array([len(request.prompt_ids) for request in requests])
        limit = prompt + np.array([request.max_tokens for request in requests])
        length = -(-int(limit.max()) // block_size) * block_size
        tokens = np.zeros((len(requests), length), dtype=np.int64)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.prompt_ids)] = request.prompt_ids
        masked = np.arange(length)[None] >= prompt[:, None]
        rows = len(requests)
        return cls(tokens, masked, prompt, limit, np.zeros(rows, dtype=bool), np.ones(rows), requests)

    def decide(self, row: int, position: int, token: int) -> None:
        self.tokens[row, position] = token
        self.masked[row, position] = False

    def mark_done(self) -> None:
        """A row is done when its answer ends with nothing masked before."""
        for row in np.flatnonzero(~self.done).tolist():
            self.done[row] = self._end(row) > 0

    def _end(self, row: int) -> int:
        """Position behind the answer, 0 while it goes on."""
        for position in range(self.prompt[row], self.limit[row]):
            if self.masked[row, position]:
                return 0
            if int(self.tokens[row, position]) in self.requests[row].stop_token_ids:
                return position + 1
        return int(self.limit[row])

    def answers(self) -> Answers:
        rows = range(len(self.requests))
        return [tuple(self.tokens[row, self.prompt[row] : self._end(row)].tolist()) for row in rows]


class LockstepDecoder:
    """Decodes batches of requests with one policy. margins: also find each row's closest decision (slower)."""

    def __init__(self, backbone: Backbone, *, margins: bool = False) -> None:
        assert backbone.block_diffusion is not None, "blocks need a block-diffusion model"
        self.backbone = backbone
        self.block_size = backbone.block_diffusion.block_size
        self.sub_block_size = backbone.block_diffusion.sub_block_size
        self.mask_token_id = backbone.block_diffusion.mask_token_id
        self.margins = margins

    def answer(self, requests: Sequence[GenerationRequest]) -> Answers:
        return self.decode(requests).answers()

    def decode(self, requests: Sequence[GenerationRequest]) -> LockstepBatch:
        """The batch with all its rows done."""
        decode = requests[0].decode
        if decode.policy not in ("threshold", "static") or any(r.decode != decode for r in requests):
            raise UserError(
                f"lock-step batches decode with threshold or static, all rows alike, not {decode.policy!r}."
            )
        batch = LockstepBatch.of(requests, self.block_size)
        cache = JoinedCache(self.block_size)
        start = int(batch.prompt.min()) // self.block_size * self.block_size
        with torch.inference_mode():
            if start:
                self._commit(batch, cache, 0, start)
            while not batch.done.all():
                for first in range(start, start + self.block_size, self.sub_block_size):
                    self._sub_block(batch, cache, start, first)
                if not batch.done.all():
                    self._commit(batch, cache, start, start + self.block_size)
                start += self.block_size
        return batch

    def _commit(self, batch: LockstepBatch, cache: JoinedCache, start: int, end: int) -> None:
        """Keep [start, end) of all rows; the last logit decides the next block's first slot."""
        logits = self._forward(batch, cache, start, end, read=[end - 1 - start], keep=True)
        token, confidence, second = self._choose(logits)
        for row in np.flatnonzero(batch.masked[:, end : end + 1].any(1)).tolist():
            batch.decide(row, end, int(token[row, 0]))
            if not batch.done[row]:
                batch.margin[row] = min(batch.margin[row], float(confidence[row, 0] - second[row, 0]))
        batch.mark_done()

    def _sub_block(self, batch: LockstepBatch, cache: JoinedCache, start: int, first: int) -> None:
        """Steps of the whole batch until no unfinished row has a mask in [first, first + S)."""
        slots = range(max(first, start + 1), first + self.sub_block_size)  # a block's first slot is decided outright
        index = (first - start) // self.sub_block_size
        step = 0
        while slots and batch.masked[~batch.done][:, slots].any():
            read = [slot - 1 - start for slot in slots]
            logits = self._forward(batch, cache, start, start + self.block_size, read=read, keep=False)
            token, confidence, second = self._choose(logits)
            for row in np.flatnonzero(batch.masked[:, slots].any(1) & ~batch.done).tolist():
                candidates = np.flatnonzero(batch.masked[row, slots])
                opened = self._opens(batch.requests[row], confidence[row, candidates], index, step)
                if self.margins:
                    self._note_margin(batch, row, confidence[row, candidates], second[row, candidates])
                for slot in candidates[opened]:
                    batch.decide(row, slots[slot], int(token[row, slot]))
            batch.mark_done()
            step += 1

    def _forward(
        self, batch: LockstepBatch, cache: JoinedCache, start: int, end: int, *, read: Sequence[int], keep: bool
    ) -> Tensor:
        """Logits [B, len(read), V] of the whole batch's positions [start, end)."""
        model = self.backbone.model
        canvas = np.where(batch.masked[:, start:end], self.mask_token_id, batch.tokens[:, start:end])
        cache.begin(end - start, model.dtype, model.device, keep=keep)
        logits: Tensor = model(
            input_ids=torch.from_numpy(canvas).to(model.device),
            position_ids=torch.arange(start, end, device=model.device).expand(len(canvas), -1),
            use_cache=False,
            attention_plan=cache,
            logits_to_keep=torch.tensor(read, device=model.device),
        ).logits
        return logits

    def _choose(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Most likely token, its probability and that of the next one [B, n], without the mask token."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits[..., self.mask_token_id] = -torch.inf
        token = logits.argmax(-1)
        total = logits.logsumexp(-1)
        best = torch.exp(logits.gather(-1, token[..., None])[..., 0] - total)
        second = torch.exp(logits.topk(2).values[..., 1] - total) if self.margins else torch.zeros_like(best)
        return token.cpu().numpy(), best.cpu().numpy(), second.cpu().numpy()

    def _opens(self, request: GenerationRequest, confidence: np.ndarray, index: int, step: int) -> np.ndarray:
        """Bool [n]: the candidates of one row that open in step `step` of sub-block `index`."""
        ranked = np.argsort(-confidence, kind="stable")
        opens = np.zeros(len(confidence), dtype=bool)
        if request.decode.policy == "threshold":
            opens[ranked[0]] = True
            return np.asarray(opens | (confidence > np.float32(request.decode.threshold)))
        sub_blocks = self.block_size // self.sub_block_size
        granted = steps_of_sub_block(request.decode.steps or self.block_size, index, sub_blocks)
        opens[ranked[: -(-len(confidence) // max(1, granted - step))]] = True
        return opens

    def _note_margin(self, batch: LockstepBatch, row: int, confidence: np.ndarray, second: np.ndarray) -> None:
        """The closest of this step's decisions: against the threshold, between two slots, between two tokens."""
        gaps = [confidence - second]
        ranked = np.sort(confidence)
        threshold = batch.requests[row].decode.threshold
        if batch.requests[row].decode.policy == "threshold":
            gaps.append(np.abs(confidence - threshold))
        if batch.requests[row].decode.policy != "threshold" or ranked[-1] <= threshold:
            gaps.append(ranked[1:] - ranked[:-1])
        batch.margin[row] = min(batch.margin[row], float(np.concatenate(gaps).min()))
