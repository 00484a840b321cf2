"""The state of every recurrent layer before every noisy block, from one pass of the context tower.

While a recurrent mixer runs over whole rows, a hook sees its input, and the cache all inputs of its convolution. The
convolution's state at any place is a slice of those. The recurrent state is found segment by segment, from one block
start to the next:
  - Mamba: a segment maps the state s before it to a * s + c, number by number. Two runs of all segments at once, from
    zeros and from ones, give c and a + c; the states follow by one multiplication a segment.
  - anything else (the delta rule mixes the numbers): the mixer alone runs again, segment after segment.
Either way attention, experts and MLPs ran once. No modeling code is copied: the mixer itself is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from model.two_tower.recurrent import LayerState, StateCache, States
from model.two_tower.sublayers import RECURRENT, decoder_layers, sublayers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Segment(NamedTuple):
    """Tokens [begin, end) of a row, from one block start (or the row's) to the next; `rank` counts within the row."""

    row: int
    begin: int
    end: int
    rank: int


def segments_of(rows: Tensor, offsets: Tensor) -> list[Segment]:
    """The segments that end at the block starts (rows, offsets), int64 [N]; a start at 0 ends none."""
    starts: dict[int, set[int]] = defaultdict(set)
    for row, offset in zip(rows.tolist(), offsets.tolist(), strict=True):
        starts[row].add(offset)
    segments = []
    for row, found in starts.items():
        ends = sorted(found - {0})
        begins = [0, *ends][: len(ends)]
        segments += [Segment(row, *span, rank) for rank, span in enumerate(zip(begins, ends, strict=True))]
    return segments


class Boundaries:
    """Collects the states before N blocks: rows, offsets int64 [N] say in which context row and where each starts."""

    def __init__(self, causal_lm: PreTrainedModel, rows: Tensor, offsets: Tensor, *, fold: bool = True) -> None:
        """fold: use Mamba's shortcut; False runs every layer again segment by segment (the slower oracle)."""
        self.layers = len(decoder_layers(causal_lm))
        self.mixers = recurrent_mixers(causal_lm)
        self.rows, self.offsets, self.fold = rows, offsets, fold
        self.segments = segments_of(rows, offsets)
        self.states: States = {}

    @contextmanager
    def watching(self, cache: StateCache) -> Iterator[None]:
        """While the context tower runs over whole rows with this cache."""
        handles = []
        for layer, mixer in self.mixers.items():

            def collect(module: nn.Module, args: Any, kwargs: Any, out: Any, layer: int = layer) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                self.states[layer] = self._before_blocks(layer, module, hidden.detach(), cache)

            handles.append(mixer.register_forward_hook(collect, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_blocks(self, layer: int, mixer: nn.Module, hidden: Tensor, cache: StateCache) -> LayerState:
        inputs = cache.conv_inputs(layer)
        kernel = inputs.shape[-1] - hidden.shape[1]
        windows = inputs.unfold(-1, kernel, 1)  # [R, C, 1 + n, K]: the K inputs before each place

        def conv(rows: Tensor, offsets: Tensor) -> Tensor:
            return windows[rows, :, offsets].contiguous()

        final = cache.final(layer)
        if final is None:
            return LayerState(conv(self.rows, self.offsets), None)
        runner = _Runner(layer, self.layers, mixer, hidden, conv, torch.zeros_like(final[:1]))
        find = runner.folded if self.fold and is_diagonal(mixer) else runner.replayed
        ends = find(self.segments)
        zero = runner.zero[0]
        places = zip(self.rows.tolist(), self.offsets.tolist(), strict=True)
        return LayerState(conv(self.rows, self.offsets), torch.stack([ends.get(place, zero) for place in places]))


class _Runner:
    """Runs one mixer over segments of its input [R, n, H]. `zero`: an empty recurrent state, [1, ...]."""

    def __init__(self, layer: int, layers: int, mixer: nn.Module, hidden: Tensor, conv: Any, zero: Tensor) -> None:
        self.layer, self.layers, self.mixer = layer, layers, mixer
        self.hidden, self.conv, self.zero = hidden, conv, zero

    def run(self, segments: list[Segment], initial: Tensor) -> Tensor:
        """States [M, ...] behind segments of one length, from the states `initial` before them."""
        rows = torch.tensor([s.row for s in segments], device=self.hidden.device)
        begins = torch.tensor([s.begin for s in segments], device=self.hidden.device)
        length = segments[0].end - segments[0].begin
        places = begins[:, None] + torch.arange(length, device=self.hidden.device)
        seeds = {self.layer: LayerState(self.conv(rows, begins), initial)}
        cache = StateCache(self.layers, seeds, one_token=length == 1)
        self.mixer.forward(self.hidden[rows[:, None], places], cache=cache)
        behind = cache.after()[self.layer].recurrent
        assert behind is not None
        return behind

    def replayed(self, segments: list[Segment]) -> dict[tuple[int, int], Tensor]:
        """States by (row, end), one segment of every row after the other."""
        ends: dict[tuple[int, int], Tensor] = {}
        rounds: dict[tuple[int, int], list[Segment]] = defaultdict(list)
        for segment in segments:
            rounds[segment.rank, segment.end - segment.begin].append(segment)
        for key in sorted(rounds):
            group = rounds[key]
            before = torch.stack([ends.get((s.row, s.begin), self.zero[0]) for s in group])
            for segment, state in zip(group, self.run(group, before), strict=True):
                ends[segment.row, segment.end] = state
        return ends

    def folded(self, segments: list[Segment]) -> dict[tuple[int, int], Tensor]:
        """The same, from two runs of all segments of one length at once."""
        maps: dict[Segment, tuple[Tensor, Tensor]] = {}
        lengths: dict[int, list[Segment]] = defaultdict(list)
        for segment in segments:
            lengths[segment.end - segment.begin].append(segment)
        for group in lengths.values():
            zeros = self.zero.expand(len(group), *self.zero.shape[1:])
            from_zeros = self.run(group, zeros)
            from_ones = self.run(group, torch.ones_like(zeros))
            maps |= dict(zip(group, zip(from_ones - from_zeros, from_zeros, strict=True), strict=True))
        ends: dict[tuple[int, int], Tensor] = {}
        for segment in sorted(segments):
            decay, added = maps[segment]
            ends[segment.row, segment.end] = decay * ends.get((segment.row, segment.begin), self.zero[0]) + added
        return ends


def recurrent_mixers(causal_lm: PreTrainedModel) -> dict[int, nn.Module]:
    """The recurrent mixer of each layer that has one."""
    found = {}
    for sublayer in sublayers_of(causal_lm):
        for branch in sublayer.branches:
            if sublayer.kind == RECURRENT and hasattr(branch, "conv_kernel_size"):
                found[sublayer.layer] = branch
    return found


def is_diagonal(mixer: nn.Module) -> bool:
    """Whether the state's numbers evolve each on its own: Mamba has a decay (A) and a skip (D), the delta rule no D."""
    return hasattr(mixer, "A_log") and hasattr(mixer, "D")
