"""What the towers attend to: the context tower's keys and values, read by the denoiser and written by nobody else.

Rows are folded: a tower runs on [R, n], so that recurrent layers keep rows apart, and attends in one sequence
[1, R * n] under a plan. A context pass records the rotated keys and values of every layer (`Recording`); the denoiser
attends to [context ; own block] under `masks.two_tower` (`Beside`), and nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.attention import StreamPlan, within_window
from model.capping import capped_attention
from model.masks import CLEAN, Tokens, causal, two_tower

KeysValues = dict[int, tuple[Tensor, Tensor]]  # by layer: [1, Hkv, T, D] each, rotated


@dataclass(frozen=True)
class Recording:
    """Causal attention of the context tower over T tokens, which keeps every layer's keys and values."""

    tokens: Tokens
    streams: StreamPlan
    kept: KeysValues = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        self.kept[layer] = (key.detach(), value.detach())
        return self.streams.attend(layer, query, key, value, scale, sliding_window)

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        self.kept[layer] = (key.detach(), value.detach())
        return self.streams.attend_capped(layer, query, key, value, scale, window, softcap)


def recording(documents: Tensor, positions: Tensor) -> Recording:
    """documents, positions: int64 [T] of the clean tokens; TAIL as a document is padding, which sees itself only."""
    tokens = Tokens(torch.full_like(positions, CLEAN), documents, torch.arange(len(positions)), positions)
    streams = StreamPlan(_on(tokens, documents.device), len(positions), 1, causal, last_layer=-1)
    return Recording(streams.tokens, streams)


@dataclass(frozen=True)
class Beside:
    """The denoiser's attention: N blocks of S tokens in one sequence, over recorded keys and values and themselves."""

    streams: StreamPlan
    kept: KeysValues

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        keys, values = self._with_context(layer, key, value)
        nothing = query.new_zeros((1, query.shape[1], self.streams.clean, query.shape[3]))
        queries = torch.cat((nothing, query), dim=2)
        out = self.streams.attend(self.streams.last_layer, queries, keys, values, scale, sliding_window)
        return out[:, :, self.streams.clean :]

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        keys, values = self._with_context(layer, key, value)
        clean, tokens = self.streams.clean, self.streams.tokens

        def allowed(rows: slice) -> Tensor:
            q = tokens.at((slice(clean + rows.start, clean + rows.stop), None))
            k = tokens.at((None, slice(None)))
            seen = two_tower(q, k)
            return seen & (within_window(seen, q, k, window) | (k.stream != CLEAN))

        return capped_attention(query, keys, values, allowed, scale, softcap)

    def _with_context(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[context ; own], on the denoiser's device; the context's part carries no gradient."""
        context_key, context_value = (x.to(key.device, key.dtype) for x in self.kept[layer])
        return torch.cat((context_key, key), dim=2), torch.cat((context_value, value), dim=2)


def beside(
    kept: KeysValues,
    context_documents: Tensor,
    context_positions: Tensor,
    block_documents: Tensor,
    block_starts: Tensor,
    block_streams: Tensor,
    block_size: int,
) -> Beside:
    """Documents and positions int64 [T] of context tokens; document, first position and stream int64 [N] of each block.

    Blocks of one place in different streams do not see each other.
    """
    own = torch.arange(block_size, device=block_starts.device)
    tokens = Tokens(
        stream=torch.cat(
            (
                torch.full_like(context_positions, CLEAN),
                block_streams.repeat_interleave(block_size),
            )
        ),
        document=torch.cat((context_documents, block_documents.repeat_interleave(block_size))),
        block=torch.cat((context_positions, block_starts.repeat_interleave(block_size))),
        position=torch.cat((context_positions, (block_starts[:, None] + own).flatten())),
    )
    return Beside(StreamPlan(tokens, len(context_positions), block_size, two_tower, last_layer=-1), kept)


def _on(tokens: Tokens, device: torch.device) -> Tokens:
    return Tokens(*(x.to(device) for x in tokens))
