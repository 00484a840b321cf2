"""One training run from the driver's side: start Ray Train, show what happens, try again after lost workers, stop.

`fit()` runs in a thread, so that SIGINT and SIGTERM reach the main thread, which asks the workers to save and waits for
them. Ray's own retries are off: a failure that one sentence explains must end the job, a lost worker must not, and
Ray counts both alike. What was committed decides whether a failure was progress.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.fs
import ray
from fsspec.core import url_to_fs
from ray.exceptions import RayError
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.training.board import Board, Failure, News
from actors.training.checkpoints import CheckpointStore
from actors.training.run_files import Fence
from actors.training.settings import TrainSettings
from actors.training.trainer import train_worker
from model.errors import JobError, UserError
from pipelines.jobkit import OutputFolder, Progress
from pipelines.training.resources import Placement
from pipelines.training.watch import Watch, WorkersLeft

LOOK_EVERY_S = 0.25
COLLECTIVE_TIMEOUT_S = 1800
GROUP_STARTS = 3  # times that Ray waits a minute for resources which somebody else took meanwhile
SCRATCH = ".ray_train"
HIDDEN = ("HF_TOKEN",)


def train(settings: TrainSettings, placement: Placement, output: OutputFolder, max_failures: int) -> None:
    """Run until `<output>/model` is there. Raises UserError and JobError as the workers found them."""
    store = CheckpointStore(settings.output, keep=settings.keep_checkpoints)

    def newest() -> int:
        return max((commit.step for commit in store.committed()), default=0)

    def attempt() -> Exception | None:
        for damage in store.damaged():
            print(f"adapt: {damage} It is left out.", file=sys.stderr, flush=True)
        return _attempt(settings, placement, output, already=newest())

    persist(attempt, newest, max_failures)


def persist(attempt: Callable[[], Exception | None], newest: Callable[[], int], max_failures: int) -> None:
    """Call attempt until it returns None; an exception it returns is tried again.

    newest: the last committed step; failures are counted anew whenever it moves. Raises JobError after more than
    max_failures in a row; a WorkersLeft that does not count is none where it brought a checkpoint.
    """
    before, failures = newest(), 0
    while (error := attempt()) is not None:
        now = newest()
        if isinstance(error, WorkersLeft) and not error.counts and now > before:
            before, failures = now, 0
            continue
        failures = 1 if now > before else failures + 1
        before = now
        print(f"adapt: the workers failed after step {now}:\n{error}", file=sys.stderr, flush=True)
        if failures > max_failures:
            raise JobError(
                f"Training failed {failures} times in a row after step {now}, see above; "
                "the same command goes on from there."
            ) from error
        print(f"adapt: starting them again ({failures} of {max_failures})", file=sys.stderr, flush=True)


def _attempt(settings: TrainSettings, placement: Placement, output: OutputFolder, already: int) -> Exception | None:
    """One fit. None: done. An exception: the workers were lost, another attempt may do."""
    output.check()
    hidden = {name: os.environ[name] for name in HIDDEN if name in os.environ}
    try:
        board = _board_beside_me(hidden)
        watch = Watch(board, settings.step_timeout_s)
        with _fence(settings.output) as token, _scratch(settings.output):
            fit = Fit(settings, placement, board, token)
            failure = _watched(fit, board, watch, settings, already)
    except RayError as error:
        return error
    if failure is not None:
        raise (UserError if failure.user_error else JobError)(failure.message)
    return watch.left or fit.error


def _board_beside_me(environment: dict[str, str]) -> Any:
    """A Board on the driver's node, so that it does not go with a node of workers."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here).remote(environment)


def _watched(fit: Fit, board: Any, watch: Watch, settings: TrainSettings, already: int) -> Failure | None:
    """Run the fit to its end; what the workers say was wrong, if they could say."""
    fit.start()
    try:
        _follow(fit, board, watch, settings.steps, already)
    except KeyboardInterrupt:
        _stop(fit, board, settings.stop_grace_s)
        raise
    failure: Failure | None = ray.get(board.failure.remote())
    ray.kill(board)
    return failure


class Fit(threading.Thread):
    """trainer.fit() in a thread; `error` is what it raised, None when it returned.

    `ended` is waited for, never the thread: a signal's exception in Thread.join leaves Python thinking that it is over.
    """

    def __init__(self, settings: TrainSettings, placement: Placement, board: Any, token: str) -> None:
        super().__init__(name="fit", daemon=True)
        self.error: Exception | None = None
        self.ended = threading.Event()
        filesystem, root = url_to_fs(settings.output)
        local = "file" in filesystem.protocol
        self._trainer = TorchTrainer(
            train_worker,
            train_loop_config={"settings": settings, "board": board, "token": token},
            torch_config=TorchConfig(
                backend="nccl" if placement.device == "cuda" else "gloo", timeout_s=COLLECTIVE_TIMEOUT_S
            ),
            scaling_config=ScalingConfig(
                num_workers=placement.workers,
                use_gpu=placement.device == "cuda",
                resources_per_worker=placement.bundle,
            ),
            run_config=RunConfig(  # type: ignore[call-arg]  # Ray's types show the class of Train's first version
                name=token,
                storage_path=f"{root}/{SCRATCH}",
                storage_filesystem=None if local else pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem)),
                failure_config=FailureConfig(  # type: ignore[call-arg]
                    max_failures=0, controller_failure_limit=GROUP_STARTS
                ),
                logging_config=LoggingConfig(log_level="CRITICAL"),
            ),
        )

    def run(self) -> None:
        try:
            self._trainer.fit()
        except Exception as error:  # whatever ended the workers: the caller decides whether to try again
            self.error = error
        finally:
            self.ended.set()


@contextmanager
def _fence(output: str) -> Iterator[str]:
    """A token of this attempt, which the workers check before they publish anything."""
    token = uuid.uuid4().hex[:12]
    fence = Fence(output, token)
    fence.raise_up()
    try:
        yield token
    finally:
        fence.take_down()


@contextmanager
def _scratch(output: str) -> Iterator[None]:
    """Ray Train wants a folder of its own; nothing in it outlives the attempt."""
    filesystem, root = url_to_fs(output)
    place = f"{root.rstrip('/')}/{SCRATCH}"
    filesystem.makedirs(place, exist_ok=True)
    try:
        yield
    finally:
        if filesystem.exists(place):
            filesystem.rm(place, recursive=True)


# Watching -------------------------------------------------------------------------------------------------------------


class Narrator:
    """Says on standard error what the workers do, each thing once."""

    def __init__(self) -> None:
        self._phase = ""
        self.warnings = 0

    @property
    def trains(self) -> bool:
        """Whether steps are under way."""
        return self._phase == "training"

    def tell(self, news: News) -> None:
        for warning in news.warnings:
            self._say(warning)
        self.warnings += len(news.warnings)
        if news.phase not in (self._phase, "training", "done"):
            self._say(news.phase)
        self._phase = news.phase

    def _say(self, text: str) -> None:
        print(f"adapt: {text}", file=sys.stderr, flush=True)


def _follow(fit: Fit, board: Any, watch: Watch, steps: int, already: int) -> None:
    """Show phases, warnings and steps until the fit has ended."""
    narrator = Narrator()
    while not fit.ended.is_set() and not narrator.trains:
        narrator.tell(ray.get(board.news.remote(narrator.warnings)))
        fit.ended.wait(LOOK_EVERY_S)
    with Progress("adapt", total=steps, unit="steps", already=already) as progress:
        while not fit.ended.is_set():
            fit.ended.wait(LOOK_EVERY_S)
            watch.look()
            news: News = ray.get(board.news.remote(narrator.warnings))
            _show_step(progress, news)
            narrator.tell(news)
    narrator.tell(ray.get(board.news.remote(narrator.warnings)))


def _show_step(progress: Progress, news: News) -> None:
    record = news.record
    if record is not None and record["step"] > progress.completed:
        loss = {} if record["loss"] is None else {"loss": record["loss"]}
        progress.update(record["step"], **loss, **{"tokens/s": record["tokens_per_second"]})


def _stop(fit: Fit, board: Any, grace_s: float) -> None:
    """Let the workers save what they have, for so many seconds; a second signal ends the wait."""
    print("adapt: stopping; the workers save a checkpoint first", file=sys.stderr, flush=True)
    ray.get(board.request_stop.remote())
    deadline = time.monotonic() + grace_s
    while not fit.ended.is_set() and time.monotonic() < deadline:
        fit.ended.wait(LOOK_EVERY_S)
