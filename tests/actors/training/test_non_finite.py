"""A broken step names the samples whose predictions broke, and no more than ten in a row are skipped."""

from __future__ import annotations

import math

import pytest
import torch

from actors.training.micro_batches import MicroBatch
from actors.training.non_finite import MOST_IN_A_ROW, NonFinite
from actors.training.ranks import Ranks
from actors.training.rows import Sample
from model.errors import JobError
from model.objective import BlockDiffusion
from tests.model.rows import MASK, random_rows

ALONE = Ranks(0, 1, 0, None)


def micro_batch(samples: list[int]) -> MicroBatch:
    batch = BlockDiffusion(8, MASK, 0, 1).batch(random_rows(1, rows=len(samples)), samples, 0)
    return MicroBatch(batch, batch.tokens, tuple(Sample(sample, 0) for sample in samples))


def losses_with_nan_in(micro: MicroBatch, row: int) -> torch.Tensor:
    losses = torch.ones(len(micro.batch.targets))
    losses[(micro.batch.rows == row).nonzero()[0]] = math.nan
    return losses


def test_the_rows_whose_predictions_are_not_finite_are_named() -> None:
    one, other = micro_batch([40, 41, 42]), micro_batch([50, 51])
    assert set(one.batch.rows.tolist()) == {0, 1, 2}
    seen = NonFinite("skip", ALONE, "rows")
    seen.observe(one.batch, losses_with_nan_in(one, 1))
    seen.observe(other.batch, losses_with_nan_in(other, 0))
    assert seen.judge(6, math.nan, None, [one, other]) == [41, 50]
    seen.begin()
    seen.observe(one.batch, losses_with_nan_in(one, 2))
    assert seen.judge(7, math.nan, None, [one]) == [42]


def test_stopping_is_one_sentence_with_step_samples_and_place() -> None:
    micro = micro_batch([40, 41, 42])
    seen = NonFinite("stop", ALONE, "/data/rows")
    seen.observe(micro.batch, losses_with_nan_in(micro, 0))
    with pytest.raises(JobError) as caught:
        seen.judge(6, math.nan, None, [micro])
    assert str(caught.value).startswith("The loss of step 7 is nan (samples 40): look at these rows of /data/rows,")


def test_a_gradient_that_is_not_finite_while_its_losses_are_names_the_steps_samples() -> None:
    micro = micro_batch([40, 41])
    seen = NonFinite("stop", ALONE, "rows")
    seen.observe(micro.batch, torch.ones(len(micro.batch.targets)))
    with pytest.raises(JobError, match=r"The gradient of step 7 is not finite, .* \(samples 40, 41\)"):
        seen.judge(6, 2.5, None, [micro])


def test_weights_that_break_every_step_end_the_run_whatever_was_asked_for() -> None:
    micro = micro_batch([40, 41])
    seen = NonFinite("skip", ALONE, "rows")
    for step in range(MOST_IN_A_ROW - 1):
        seen.judge(step, math.nan, None, [micro])
    assert seen.judge(20, 2.5, 1.0, [micro]) is None
    for step in range(MOST_IN_A_ROW):
        seen.judge(step, math.nan, None, [micro])
    with pytest.raises(JobError, match="the weights themselves are broken"):
        seen.judge(MOST_IN_A_ROW, math.nan, None, [micro])
