"""How far to trust a forecast of time: the two runs whose hours were published, forecast in the same way.

METHOD's recipe (arXiv 2509.26328): 256 rows of 2,048 tokens a step on 64 A100, 6,000 steps of the 1.5B model in about
8 hours and 2,500 of the 7B in about 12. The published form runs 4 tokens for each token of a row and the head on half
of them. Not published, hence assumed: the 80 GB GPUs, 8 x 200 Gbit/s a node (DGX A100), activation checkpointing, one
or two rows in a forward.

EFFICIENCY is calibrated on these two times: the one number that makes the forecasts of both wrong by the same factor in
opposite directions. So it is no independent evidence that both are met on average; that one number meets both is, and
that each predicts the other when it is calibrated alone (`left_out`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from model.backbone import read_architecture
from pipelines.planning import known
from pipelines.planning.forecast import Assumed, Forecast, forecast
from pipelines.planning.hardware import GPUS, Cluster
from pipelines.planning.setup import Setup
from pipelines.planning.shape import Shape, shape_of_config
from pipelines.planning.work import published_rows

EFFICIENCY = 0.34  # of the peak in matrix products; see above
OVERLAP = 0.8  # of communication that hides behind computing: assumed, DeepSpeed prefetches parameters
DGX_GBIT = 1600
ROWS, ROW_TOKENS = 256, 2048


@dataclass(frozen=True)
class Run:
    """A published run. hours: about, as the paper gives them."""

    model: str
    steps: int
    hours: float
    micro_rows: int


RUNS = (Run("Qwen/Qwen2.5-1.5B-Instruct", 6000, 8.0, 2), Run("Qwen/Qwen2.5-7B-Instruct", 2500, 12.0, 1))


@dataclass(frozen=True)
class Check:
    """A published run against its forecast. implied: the efficiency at which the forecast meets the published hours;
    left_out: hours forecast with the efficiency that the other run implies."""

    run: Run
    forecast: Forecast
    implied: float
    left_out: float

    @property
    def error(self) -> float:
        """Forecast over published, less one."""
        return self.forecast.hours / self.run.hours - 1

    @property
    def implied_mfu(self) -> float:
        """The model's own operations of the published form over the peak of the published time."""
        return self.forecast.mfu * self.forecast.hours / self.run.hours


def check_published(efficiency: float = EFFICIENCY) -> list[Check]:
    """Both runs."""
    implied = [_implied(run) for run in RUNS]
    return [
        Check(run, _forecast(run, efficiency), own, _forecast(run, other).hours)
        for run, own, other in zip(RUNS, implied, reversed(implied), strict=True)
    ]


@cache
def _shape(run: Run) -> Shape:
    folder = known.folder_of(run.model)
    assert folder is not None, "the published models are among the known ones"
    return shape_of_config(read_architecture(folder), run.model)


def _forecast(run: Run, efficiency: float) -> Forecast:
    cluster = Cluster("a100-80gb", replace(GPUS["a100-80gb"], network_gbit=DGX_GBIT), 8, 8)
    setup = Setup(
        workers=cluster.workers,
        cuda=True,
        zero_stage=3,
        width=2,
        micro_rows=run.micro_rows,
        rows_per_step=ROWS,
        row_tokens=ROW_TOKENS,
        streams=4.0,
        predicted=2.0,
        checkpointing=True,
        reduce_bucket=500_000_000,
        live_parameters=1_000_000_000,
        loss_chunk=1 << 60,
    )
    assumed = Assumed(efficiency, OVERLAP, documents=1)
    return forecast(_shape(run), setup, cluster, assumed, run.steps, published_rows(ROW_TOKENS))


def _implied(run: Run) -> float:
    """The efficiency that makes the forecast meet the published hours, by bisection."""
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _forecast(run, middle).hours > run.hours else (low, middle)
    return (low + high) / 2
