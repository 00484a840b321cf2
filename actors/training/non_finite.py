"""A step whose loss or gradient is no finite number: which samples it was, and whether the run stops or goes on.

Such a step changes no weight on any rank. `stop` ends the run with the samples' ids; `skip` says them, counts the step
and goes on, but not for long: weights that are broken themselves break every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.training.method import Batch
from actors.training.micro_batches import MicroBatch
from actors.training.ranks import Ranks
from model.errors import JobError

MOST_NAMED = 8  # sample ids that each rank names
MOST_IN_A_ROW = 10  # skipped steps, after which the run ends whatever was asked for


class NonFinite:
    """What one rank knows of the step's losses; every rank calls the same methods at the same steps."""

    def __init__(self, on_nan: str, ranks: Ranks, rows: str) -> None:
        self._skip, self._ranks, self._where = on_nan == "skip", ranks, rows
        self._seen: list[tuple[Batch, Tensor]] = []
        self._in_a_row = 0

    def begin(self) -> None:
        """A step begins."""
        self._seen = []

    def observe(self, batch: Batch, losses: Tensor) -> None:
        """losses: of the batch's predictions, [N]; looked at only when the step turns out to be broken."""
        self._seen.append((batch, losses))

    def judge(self, step: int, loss: float, norm: float | None, micro: Sequence[MicroBatch]) -> list[int] | None:
        """None for an ordinary step; for one that changed no weight (norm None) the sample ids that broke it.

        step: 0-based; micro: what this rank ran. Raises JobError where the run stops.
        """
        if norm is not None:
            self._in_a_row = 0
            return None
        ids, text = self._culprits(step, loss, micro)
        self._in_a_row += 1
        if not self._skip:
            raise JobError(
                f"{text}: look at these rows of {self._where}, lower --train.learning_rate, or leave such steps out "
                "with --train.on_nan skip and another --output; the checkpoints before it are kept."
            )
        if self._in_a_row > MOST_IN_A_ROW:
            raise JobError(
                f"{text}, as was each of the {MOST_IN_A_ROW} before it: the weights themselves are broken; go back to "
                "an earlier model and lower --train.learning_rate."
            )
        return ids

    def _culprits(self, step: int, loss: float, micro: Sequence[MicroBatch]) -> tuple[list[int], str]:
        """Sample ids, and what is to be said of them; where no loss is to blame the step's samples are."""
        ids = self._of_all_ranks(self._here(micro))
        if ids:
            return ids, f"The loss of step {step + 1} is {loss} (samples {_listed(ids)})"
        ids = self._of_all_ranks([sample.row for one in micro for sample in one.samples])
        return ids, f"The gradient of step {step + 1} is not finite, its losses are (samples {_listed(ids)})"

    def _here(self, micro: Sequence[MicroBatch]) -> list[int]:
        """Samples of this rank with a prediction whose loss is not finite."""
        found: set[int] = set()
        for one, (batch, losses) in zip(micro, self._seen, strict=False):
            if one.samples:
                bad = ~torch.isfinite(losses).cpu()
                found |= {one.samples[row].row for row in batch.rows.cpu()[bad].unique().tolist()}
        return sorted(found)

    def _of_all_ranks(self, mine: Sequence[int]) -> list[int]:
        """The first few of every rank, sorted."""
        board = [0] * (MOST_NAMED * self._ranks.world)
        first = MOST_NAMED * self._ranks.rank
        for place, sample in enumerate(mine[:MOST_NAMED]):
            board[first + place] = sample + 1
        return sorted({sample - 1 for sample in self._ranks.total(board) if sample})


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(str(sample) for sample in ids)
