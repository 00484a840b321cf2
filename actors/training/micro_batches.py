"""A step's rows as micro-batches: cut by a number of rows, or filled up to a number of tokens.

Every rank runs the same number of forwards, because every rank must take part in every collective. By rows a rank takes
a contiguous share of the global batch. By tokens the whole global batch is dealt out: rows differ in how much of them
the network must run on (`BatchMaker.lengths`), so short ones share a forward and the ranks get equal work. Either way
the loss and the batch hash are those of the global batch, whoever ran which row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from actors.training.method import Batch, BatchMaker, Method
from actors.training.ranks import Ranks, halves, whole
from actors.training.rows import PackedRows, RowOrder, Sample, share
from actors.training.settings import TrainSettings
from model.corruption import IGNORED
from model.layout import combine_hashes


@dataclass(frozen=True)
class MicroBatch:
    """One forward. tokens: of its documents, padding inside their last blocks included. samples: none for a filler."""

    batch: Batch
    tokens: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Totals:
    """What a global batch adds up to over all ranks. scored_tokens: what its loss is a mean over."""

    supervised_tokens: int
    scored_tokens: int
    tokens: int
    batch_hash: str


class MicroBatches:
    """The micro-batches of one rank. Every rank must ask for the same steps: by tokens the ranks talk."""

    def __init__(self, settings: TrainSettings, rows: PackedRows, method: Method, ranks: Ranks) -> None:
        self._settings, self._rows, self._method, self._ranks = settings, rows, method, ranks
        self._order = RowOrder(len(rows), settings.rows_per_step, settings.seed)

    def samples(self, step: int) -> list[Sample]:
        """The global batch of a 0-based step."""
        return self._order.samples(step)

    def of(self, step: int) -> list[MicroBatch]:
        """What this rank runs in a 0-based step."""
        maker = self._method.objective_at(step)
        return [self._micro_batch(samples, maker) for samples in self._divided(self.samples(step), maker)]

    def totals(self, micro: Sequence[MicroBatch]) -> Totals:
        """Of all ranks' micro-batches of a step."""
        real = [one for one in micro if one.samples]
        supervised, scored, tokens, high, low = self._ranks.total(
            [
                sum(one.batch.supervised_tokens for one in real),
                sum(one.batch.scored_tokens for one in real),
                sum(one.tokens for one in real),
                *halves(combine_hashes(one.batch.batch_hash for one in real)),
            ]
        )
        return Totals(supervised, scored, tokens, whole(high, low))

    def _divided(self, samples: Sequence[Sample], maker: BatchMaker) -> list[list[Sample]]:
        settings, ranks = self._settings, self._ranks
        if settings.micro_tokens is None:
            return share(samples, ranks.rank, ranks.world, settings.micro_rows)
        places = deal(self._lengths(samples, maker), ranks.world, settings.micro_tokens)[ranks.rank]
        return [[samples[place] for place in part] for part in places]

    def _lengths(self, samples: Sequence[Sample], maker: BatchMaker) -> list[int]:
        """Tokens the network runs on for each row of the global batch: every rank looks at its share of them."""
        first, last = (len(samples) * edge // self._ranks.world for edge in (self._ranks.rank, self._ranks.rank + 1))
        lengths = [0] * len(samples)
        if last > first:
            rows = self._rows.rows([sample.row for sample in samples[first:last]])
            lengths[first:last] = maker.lengths(rows).tolist()
        return self._ranks.total(lengths)

    def _micro_batch(self, samples: Sequence[Sample], maker: BatchMaker) -> MicroBatch:
        """Rows as a batch; without any, a row whose labels are wiped: every rank must run every collective."""
        rows = self._rows.rows([sample.row for sample in samples] or [0])
        if not samples:
            rows = replace(rows, labels=torch.full_like(rows.labels, IGNORED))
        batch = maker.batch(
            rows, [sample.row for sample in samples] or [0], [sample.epoch for sample in samples] or [0]
        )
        return MicroBatch(batch, int((rows.document_ids >= 0).sum()), tuple(samples))


def deal(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Each rank's micro-batches, as places in the global batch: equally many for every rank, some may be empty.

    lengths: tokens of each row. No micro-batch holds more than `budget` tokens, unless it is one row that does. As few
    forwards as a longest-first deal finds; micro-batches of like work run at the same time.
    """
    longest_first = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    alone = sum(length > budget for length in lengths)
    others = sum(length for length in lengths if length <= budget)
    for forwards in count(max(1, -(-(alone + -(-others // budget)) // ranks))):
        parts = _spread(lengths, longest_first, ranks * forwards)
        if all(len(part) == 1 or sum(lengths[place] for place in part) <= budget for part in parts if part):
            break
    parts.sort(key=lambda part: (-sum(lengths[place] for place in part), part))
    return [[sorted(part) for part in parts[rank::ranks]] for rank in range(ranks)]


def _spread(lengths: Sequence[int], places: Sequence[int], parts: int) -> list[list[int]]:
    """Places into so many parts, each into the part that has least so far."""
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, 0, part) for part in range(parts)]
    for place in places:
        load, rows, part = heapq.heappop(loads)
        found[part].append(place)
        heapq.heappush(loads, (load + lengths[place], rows + 1, part))
    return found
