"""The cross-entropy of a large vocabulary without its logits: rows go through the head in chunks.

Written out, the head and the loss keep [N, V] logits in the model's format, the same in float32 and their softmax:
1.8 GB for 2,048 predictions over 152,000 tokens. Here a chunk of rows makes its logits, its losses and, while the
softmax is at hand, its gradients; then the logits go. So memory is bounded by a chunk, and nothing is computed twice:
the backward pass only scales what the forward pass left, the gradient of the hidden states [N, H] and of the head
[V, H]. Rows are the predictions that a loss reads, never the others.

Letters: N predictions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

CPU_CHUNK_BYTES = 1 << 27  # of a chunk's logits in float32
GPU_CHUNK_BYTES = 1 << 29


class LossHead(nn.Linear):
    """A language-model head that can also give the loss, so that ZeRO-3 sees one call of one module.

    It stands in the place of the model's own head and owns the same tensors under the same names.
    """

    @classmethod
    def in_place_of(cls, head: nn.Linear) -> LossHead:
        """The same weights as a LossHead; itself where it is one."""
        if isinstance(head, cls):
            return head
        made = cls(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        made.weight, made.bias = head.weight, head.bias
        return made

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor | None = None, weights: Tensor | None = None, softcap: float | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [..., V] of hidden states [..., H], never capped; with targets what `cross_entropy` gives."""
        if targets is None:
            return functional.linear(hidden, self.weight, self.bias)
        return cross_entropy(hidden, self.weight, self.bias, targets, weights, softcap=softcap)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum of weighted losses, losses [N] without weights and gradient) of a linear head in nats.

    hidden [N, H], weight [V, H], bias [V] or None, targets int64 [N], weights [N] (None: all 1). softcap: logits count
    as cap * tanh(logit / cap) (Gemma). chunk_rows: rows of a chunk; None: as many as CPU_CHUNK_BYTES or GPU_CHUNK_BYTES
    of logits allow. Losses are float32, in a float64 model
    float64. The sum can be differentiated once.
    """
    if weights is None:
        weights = torch.ones(len(targets), device=hidden.device)
    rows = chunk_rows or _rows_of_a_chunk(weight)
    gradient = torch.is_grad_enabled()
    return cast(
        tuple[Tensor, Tensor],
        _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, weights, rows, gradient, softcap),
    )


def _rows_of_a_chunk(weight: Tensor) -> int:
    whole = GPU_CHUNK_BYTES if weight.is_cuda else CPU_CHUNK_BYTES
    return max(1, whole // (4 * weight.shape[0]))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses and, where asked for, all gradients in one walk over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        rows: int,
        gradient: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        wanted = [gradient and need for need in ctx.needs_input_grad[:3]]
        sums = _Gradients(hidden, weight, bias, wanted, wide)
        losses = torch.empty(len(targets), dtype=wide, device=hidden.device)
        for part in _chunks(len(targets), rows):
            logits = functional.linear(hidden[part], weight, bias).to(wide)
            slope = None
            if softcap is not None:
                logits, slope = _capped(logits, softcap)
            losses[part], scores = _losses_and_scores(logits, targets[part], weights[part].to(wide), any(wanted))
            if any(wanted):
                sums.add(part, (scores if slope is None else scores.mul_(slope)).to(hidden.dtype))
        ctx.gradients = sums.finished()
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("this loss was differentiated already: its gradients were kept for one backward pass")
        scaled = tuple(None if g is None else g.mul_(grads[0]) for g in ctx.gradients)
        ctx.gradients = None
        return (*scaled, None, None, None, None, None)


def _chunks(count: int, rows: int) -> list[slice]:
    """Stretches of nearly equal length, none longer than `rows`."""
    parts = max(1, -(-count // rows))
    edges = [count * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in pairwise(edges)]


def _capped(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """cap * tanh(logits / cap), and its derivative."""
    bent = (logits / softcap).tanh_()
    return bent * softcap, bent.square_().neg_().add_(1)


def _losses_and_scores(logits: Tensor, targets: Tensor, weights: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """Losses [C] and d(weighted loss)/d(logits) [C, V], which takes the place of the logits."""
    here = targets[:, None]
    chosen = logits.gather(1, here)[:, 0]
    highest = logits.amax(1)
    total = logits.sub_(highest[:, None]).exp_().sum(1)
    losses = total.log() + highest - chosen
    if gradient:
        logits.mul_((weights / total)[:, None])
        logits.scatter_add_(1, here, -weights[:, None])
    return losses, logits


class _Gradients:
    """The gradients of hidden states, weight and bias, added up chunk by chunk; several chunks add in float32."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], wide: torch.dtype
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._wanted, self._wide = wanted, wide
        self._of_hidden = torch.empty_like(hidden) if wanted[0] else None
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None

    def add(self, part: slice, scores: Tensor) -> None:
        """scores [C, V]: the gradient of this chunk's logits, in the format of the hidden states."""
        if self._of_hidden is not None:
            self._of_hidden[part] = scores @ self._weight
        if self._wanted[1]:
            self._of_weight = self._added(self._of_weight, scores, part)
        if self._wanted[2]:
            added = scores.sum(0, dtype=self._wide)
            self._of_bias = added if self._of_bias is None else self._of_bias.add_(added)

    def _added(self, before: Tensor | None, scores: Tensor, part: slice) -> Tensor:
        if before is None:
            return scores.t() @ self._hidden[part]
        if before.dtype == scores.dtype == self._wide:
            return before.addmm_(scores.t(), self._hidden[part])
        return before.to(self._wide).add_(scores.t() @ self._hidden[part])

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the formats of what they are gradients of."""
        of_weight = None if self._of_weight is None else self._of_weight.to(self._weight.dtype)
        of_bias = None if self._of_bias is None or self._bias is None else self._of_bias.to(self._bias.dtype)
        return self._of_hidden, of_weight, of_bias
