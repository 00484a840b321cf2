"""Time conditioning of the denoiser (adaLN-single) by hooks: no modeling code is touched, no parameter is renamed.

    t -> sinusoid of 1000 t, 256 wide -> MLP -> SiLU -> Linear -> 3 vectors a sublayer slot, plus a table per sublayer
    h = norm(x) (1 + scale) + shift;   x = x + gate * branch(h)

Every number starts so that the denoiser is the pretrained model bit for bit at every t: the projection at 0, the
tables at shift 0, scale 0, gate 1. The final norm and the head are not modulated. A gate sits behind the norm that
follows a branch, where there is one: before it, the norm would divide the gate out again.

Two orders: "norm_first" as above, everywhere; "published" modulates before the norm in attention and recurrent layers,
which the published TwoTower weights want. Source: TwoTower (arXiv 2606.26493), PixArt-alpha (arXiv 2310.00426).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model.errors import UserError
from model.two_tower.sublayers import ATTENTION, RECURRENT, Sublayer, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORDERS = ("norm_first", "published")
SINUSOID = 256
SHIFT, SCALE, GATE = 0, 1, 2


class TimeConditioning(nn.Module):
    """From times to the vectors of every sublayer. slots: sublayers of the layer that has most (1 or 2)."""

    def __init__(self, hidden_size: int, slots: list[int]) -> None:
        """slots: the slot of each sublayer, in their order."""
        super().__init__()
        self.hidden_size = hidden_size
        self.slots = list(slots)
        self.embedder = nn.Sequential(
            nn.Linear(SINUSOID, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size), nn.SiLU()
        )
        self.projection = nn.Linear(hidden_size, 3 * hidden_size * (max(slots) + 1))
        self.tables = nn.Parameter(torch.zeros(len(slots), 3, hidden_size))
        self.reset()

    def reset(self, generator: torch.Generator | None = None) -> None:
        """The starting values: the modulation is the identity at every t."""
        with torch.no_grad():
            for layer in (self.embedder[0], self.embedder[2]):
                assert isinstance(layer, nn.Linear)
                layer.weight.normal_(0.0, 0.02, generator=generator)
                layer.bias.zero_()
            self.projection.weight.zero_()
            self.projection.bias.zero_()
            self.tables.zero_()
            self.tables[:, GATE] = 1.0

    def forward(self, t: Tensor) -> Tensor:
        """t: times in [0, 1], [M]. Returns [sublayers, M, 3, H]: shift, scale and gate."""
        vectors = self.projection(self.embedder(sinusoid(t.to(self.tables.device)).to(self.tables.dtype)))
        by_slot = vectors.view(len(t), -1, 3, self.hidden_size)[:, self.slots]  # [M, sublayers, 3, H]
        return by_slot.transpose(0, 1) + self.tables[:, None]


def sinusoid(t: Tensor) -> Tensor:
    """[M] -> [M, 256]: cosines, then sines, of 1000 t at 128 frequencies from 1 to 1/10000."""
    wide = t.to(torch.float64)
    half = SINUSOID // 2
    frequency = torch.exp(-math.log(10000.0) / half * torch.arange(half, dtype=torch.float64, device=t.device))
    angle = 1000.0 * wide[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


class Modulation:
    """The hooks on a denoiser's sublayers. They act while vectors are set, and leave a plain forward alone.

    With gradient checkpointing the backward pass reads the vectors again: run it before the next forward.
    """

    def __init__(self, sublayers: list[Sublayer], order: str) -> None:
        if order not in ORDERS:
            raise UserError(f"order must be one of {', '.join(ORDERS)}, not {order!r}.")
        self.order = order
        self.vectors: Tensor | None = None  # [sublayers, M, 3, H]
        self.index: Tensor | None = None  # which of the M times a row has, int64 [N], or a token, int64 [N, S]
        for number, sublayer in enumerate(sublayers):
            self._hook(number, sublayer)

    def set(self, vectors: Tensor | None, index: Tensor | None) -> None:
        """The times of the next forward, see `TimeConditioning`; None switches the hooks off."""
        self.vectors, self.index = vectors, index

    def set_all(self, vectors: Tensor | None) -> None:
        """One time, [sublayers, 1, 3, H], for all rows of the next forwards; None switches the hooks off."""
        self.set(vectors, None if vectors is None else torch.zeros(1, dtype=torch.long, device=vectors.device))

    def _hook(self, number: int, sublayer: Sublayer) -> None:
        def before_branch(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.vectors is None:
                return None
            if args:
                return (self._shifted(number, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._shifted(number, kwargs["hidden_states"])}

        def after_norm(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
            return None if self.vectors is None else self._shifted(number, out)

        def gate(module: nn.Module, args: Any, out: Any) -> Any:
            if self.vectors is None:
                return None
            if isinstance(out, tuple):
                return (out[0] * self._vector(number, GATE, out[0]), *out[1:])
            return out * self._vector(number, GATE, out)

        first = self.order == "published" and sublayer.kind in (ATTENTION, RECURRENT)
        if sublayer.norm is not None and not first:
            sublayer.norm.register_forward_hook(after_norm)
        else:
            for module in sublayer.branches if sublayer.norm is None else (sublayer.norm,):
                module.register_forward_pre_hook(before_branch, with_kwargs=True)
        for module in sublayer.gated:
            module.register_forward_hook(gate)

    def _shifted(self, number: int, h: Tensor) -> Tensor:
        return h * (1 + self._vector(number, SCALE, h)) + self._vector(number, SHIFT, h)

    def _vector(self, number: int, which: int, like: Tensor) -> Tensor:
        """[N, 1, H], for the N rows of `like` [N, S, H]; [N, S, H] where tokens have times of their own."""
        assert self.vectors is not None and self.index is not None
        picked = self.vectors[number, :, which].to(like.dtype)[self.index]
        return picked[:, None] if self.index.dim() == 1 else picked


@contextmanager
def gates_closed(modulation: Modulation, sublayers: int, hidden_size: int, device: torch.device) -> Iterator[None]:
    """Every gate at 0: each layer then is the identity."""
    index = torch.zeros(1, dtype=torch.long, device=device)
    modulation.set(torch.zeros(sublayers, 1, 3, hidden_size, device=device), index)
    try:
        yield
    finally:
        modulation.set(None, None)


def check_hooks(causal_lm: PreTrainedModel, modulation: Modulation, sublayers: int, plan: Any) -> None:
    """Raises UserError unless closed gates make every layer the identity: all that a layer adds is gated.

    plan: an attention plan for one row of 4 tokens.
    """
    seen: list[bool] = []

    def compare(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        seen.append(torch.equal(given, out[0] if isinstance(out, tuple) else out))

    handles = [layer.register_forward_hook(compare, with_kwargs=True) for layer in decoder_layers(causal_lm)]
    hidden = int(causal_lm.config.get_text_config().hidden_size)
    ids = torch.arange(4, device=causal_lm.device)[None]
    training = causal_lm.training
    causal_lm.eval()
    try:
        with torch.no_grad(), gates_closed(modulation, sublayers, hidden, causal_lm.device):
            causal_lm.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False, attention_plan=plan)
    finally:
        causal_lm.train(training)
        for handle in handles:
            handle.remove()
    if not seen or not all(seen):
        raise UserError(
            f"{type(causal_lm).__name__} adds something to its residual stream that TwoTower does not reach: "
            "describe its layers in model/two_tower/sublayers.py."
        )
