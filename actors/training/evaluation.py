"""How well the model of the moment does on rows it never trains on: held-out loss and a few written samples.

Every rank takes part, because under ZeRO-3 every forward and every gathered weight is a collective. Rows go one at a
time to the ranks in turn; their losses are put in order before they are added, so the sum does not depend on the number
of workers. Masks are fixed (the run's seed, the row's number), nothing random is drawn: the steps after an evaluation
are those of a run without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from actors.training.method import Batch, Method, Observer
from actors.training.ranks import Ranks
from actors.training.rows import PackedRows, RowFormat
from actors.training.samples import prompts_of
from actors.training.settings import TrainSettings
from model.errors import UserError
from model.layout import RowBatch
from model.objective import HELD_OUT_EPOCH, evaluating

LARGEST_EXPONENT = 700.0  # of a perplexity that is still a number


@dataclass(frozen=True)
class Figures:
    """On held-out rows. loss: mean nats per scored token, None where nothing was masked. bound: where the objective
    bounds the likelihood, of its negative, in nats per supervised token.
    """

    loss: float | None
    bound: float | None = None

    @property
    def perplexity(self) -> float | None:
        """The bound's exponential."""
        return None if self.bound is None or self.bound > LARGEST_EXPONENT else math.exp(self.bound)


class Evaluation:
    """The held-out rows of a run. Every rank constructs it and calls its methods at the same steps.

    form: of the training rows. Raises UserError where the held-out rows were packed otherwise, or hold no supervised
    token.
    """

    def __init__(self, training: TrainSettings, form: RowFormat, method: Method, ranks: Ranks) -> None:
        self.settings = settings = training.evaluation
        self._method, self._ranks = method, ranks
        if not settings.on:
            return
        packed = PackedRows(settings.rows)
        if packed.format != form:
            raise UserError(f"{settings.rows} and the training rows were packed differently: prepare them in one run.")
        self._rows = packed.rows(range(min(len(packed), settings.most_rows)))
        if not self._rows.supervised_tokens:
            raise UserError(f"The rows in {settings.rows} hold no supervised token: check that the data has answers.")
        self._prompts = prompts_of(self._rows, settings.samples, method.context_length - settings.sample_tokens)

    def figures(self, engine: Any) -> Figures:
        """Of the held-out rows, on every rank. engine: DeepSpeed's."""
        count, world = len(self._rows.input_ids), self._ranks.world
        sums, tally = [0.0] * (3 * count), BoundTally()
        with evaluating(engine.module), observed_by(engine.module, tally.add):
            for first in range(0, count, world):
                mine = first + self._ranks.rank
                found = self._row(engine, min(mine, count - 1), tally)  # without a row, it must run a forward too
                if mine < count:
                    sums[3 * mine : 3 * mine + 3] = found
        total = self._ranks.total_floats(sums)
        loss, scored, bound = (sum(total[part::3]) for part in range(3))
        known = bound / self._rows.supervised_tokens if tally.known else None
        return Figures(loss / scored if scored else None, known)

    def _row(self, engine: Any, row: int, tally: BoundTally) -> tuple[float, float, float]:
        """Sum of losses, scored tokens, and the sum of the bound."""
        part, rows, method = slice(row, row + 1), self._rows, self._method
        one = RowBatch(rows.input_ids[part], rows.labels[part], rows.document_ids[part], rows.position_ids[part])
        batch = method.held_out.batch(one, [row], HELD_OUT_EPOCH)
        tally.sum = 0.0
        loss, more = method.measure(engine, method.moved(batch, engine.device))
        return float(loss), float(batch.scored_tokens), tally.sum + more

    def samples(self, step: int) -> Sequence[dict[str, Any]]:
        """Lines of samples.jsonl on rank 0, nothing on the others, which help to gather the weights and wait."""
        if not self._prompts:
            return ()
        lines = self._method.write_samples(self._ranks, self._prompts, self.settings.sample_tokens)
        self._ranks.barrier()
        return [{"step": step, "time": time.time(), **line} for line in lines]


class BoundTally:
    """Adds up the likelihood's bound over forwards; `known` once a batch had one."""

    def __init__(self) -> None:
        self.sum, self.known = 0.0, False

    def add(self, batch: Batch, losses: Tensor) -> None:
        """losses: of the batch's predictions, [N]."""
        weights = batch.bound_weights
        if weights is not None:
            self.known = True
            self.sum += float((losses.double() * weights.to(losses.device).double()).sum())


@contextmanager
def observed_by(module: nn.Module, observe: Observer) -> Iterator[None]:
    """Another observer looks at the module's losses."""
    before, module.observe = module.observe, observe  # type: ignore[assignment]
    try:
        yield
    finally:
        module.observe = before
