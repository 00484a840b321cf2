"""What a Ray Train worker does: ZeRO steps over packed rows, a metrics line each, checkpoints, the final model.

A step's rows, their corruption, the learning rate and every random draw follow from (seed, step) by arithmetic, so a
checkpoint holds weights and optimizer state only, and a resumed run repeats the uninterrupted one bit for bit on the
same number of workers. The loss of a step is the sum of cross-entropy over the global batch divided by its scored
tokens (supervised ones; with two towers masked ones); DeepSpeed averages over ranks and accumulation, so each
micro-batch's sum is scaled by ranks * micro-steps / scored tokens of the global batch, which all ranks agree on before
the first backward. What is trained, and what its loss is, belongs to the method: `one_network`, `two_tower`.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import Tensor

from actors.training.board import Failure
from actors.training.checkpoints import CheckpointStore, Commit, Damaged
from actors.training.consolidate import DESCRIPTION
from actors.training.evaluation import Evaluation, Figures
from actors.training.measures import Measures
from actors.training.method import Batch, Method
from actors.training.micro_batches import MicroBatches
from actors.training.non_finite import NonFinite
from actors.training.one_network import OneNetwork
from actors.training.ranks import Ranks
from actors.training.rows import PackedRows
from actors.training.run_files import Fence, StepRecord
from actors.training.run_log import RunLog
from actors.training.settings import TrainSettings
from actors.training.shards import checkpoint_bytes, load_shards, save_shards
from actors.training.storage import Patience
from actors.training.two_tower import TwoTowers
from actors.training.update import finish_step
from actors.training.watchdog import Beat, Heart
from actors.training.zero import start_engine
from model.backbone import DTYPES
from model.errors import JobError, UserError
from model.sources import fetch_model

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Link:
    """Rank 0's line to the board; the other ranks only report failures."""

    def __init__(self, board: Any, rank: int) -> None:
        self._board: Any = board
        self._first = rank == 0

    def enter(self, phase: str) -> None:
        if self._first:
            self._board.enter.remote(phase)

    def warn(self, message: str) -> None:
        """Any rank says what went wrong without ending the run."""
        self._board.warn.remote(message)

    def publish(self, record: StepRecord) -> None:
        if self._first:
            self._board.publish.remote(asdict(record))

    def fail(self, failure: Failure) -> None:
        ray.get(self._board.fail.remote(failure))

    def take_environment(self) -> None:
        """Set the variables that the driver hands on."""
        os.environ.update(ray.get(self._board.environment.remote()))

    def beat(self, beat: Beat) -> None:
        self._board.beat.remote(beat)

    def stop_requested(self) -> bool:
        """Rank 0's answer; raises when the driver is gone. Other ranks say no and follow rank 0."""
        return self._first and bool(ray.get(self._board.stop_requested.remote()))


def train_worker(config: dict[str, Any]) -> None:
    """The function Ray Train runs on every worker. config: settings (TrainSettings), board (a Board actor), token."""
    context = ray.train.get_context()
    link = Link(config["board"], context.get_world_rank())
    try:
        link.take_environment()
        ranks = Ranks.join(context.get_world_rank(), context.get_world_size(), context.get_local_rank())
        Trainer(config["settings"], ranks, link, config["token"]).run()
    except (UserError, JobError) as error:
        link.fail(Failure(isinstance(error, UserError), str(error)))
        raise
    except OSError as error:
        if error.errno in NO_SPACE:
            link.fail(Failure(False, f"No space left in {config['settings'].output}: free some and run it again."))
        raise


class Trainer:
    """One worker of a run. Every rank constructs it and calls run() once."""

    def __init__(self, settings: TrainSettings, ranks: Ranks, link: Link, token: str) -> None:
        self.measures = Measures(settings)
        ranks = replace(ranks, watch=self.measures.communicating)
        self.settings, self.ranks, self.link, self.token = settings, ranks, link, token
        if settings.device == "cpu":
            torch.set_num_threads(settings.threads)
        else:
            torch.cuda.set_device(ray.train.torch.get_device())
        self.fence = Fence(settings.output, token)
        self.store = CheckpointStore(
            settings.output, keep=settings.keep_checkpoints, guard=self.fence.check, patient=Patience(say=link.warn)
        )
        self.log = RunLog(settings.output, self.fence)
        self.rows = PackedRows(settings.rows)
        self.non_finite = NonFinite(settings.on_nan, ranks, settings.rows)
        link.enter("loading the model")
        self.method = self._made()
        self.batches = MicroBatches(settings, self.rows, self.method, ranks)
        self.evaluation = Evaluation(settings, self.rows.format, self.method, ranks)
        self.measures.count(self.method.flops())
        self.checkpoint_bytes = self._checkpoint_bytes()
        link.enter("starting DeepSpeed")
        self.engine = start_engine(self.method.module, settings)
        self.device = self.engine.device
        self.method.settle(self.device)
        self.measures.attach(self.device)
        self.heart = Heart(ranks.rank, link.beat, settings.step_timeout_s)

    def run(self) -> None:
        """Train from the newest checkpoint to the last step, or until asked to stop; then write the model."""
        saved = self._resume()
        self.link.enter("training")
        with self.heart:
            ended = self._train(saved)
        if not ended:
            self.link.enter("stopped")
            return
        self._finish()

    def _train(self, saved: int) -> bool:
        """The steps behind the checkpoint of step `saved`; False when asked to stop before the last one."""
        for step in range(saved, self.settings.steps):
            record = self._step(step)
            self.heart.rest()
            if record is not None:
                self._told(record)
            done = step if record is None else step + 1
            if done > saved and self._saves_after(done, stopped=record is None):
                self._save(done)
                saved = done
            self.store.settle(self.ranks, wait=record is None or done == self.settings.steps)
            if record is None:
                return False
        return True

    # Beginning ------------------------------------------------------------------------------------------------------

    def _made(self) -> Method:
        """The model to train and what goes with it; every rank calls it."""
        if self.ranks.local_rank == 0:
            fetch_model(self.settings.model)
        self.ranks.barrier()
        torch.manual_seed(self.settings.seed)  # some weights are new, and drawn
        if self.settings.objective == "two_tower":
            return TwoTowers(self.settings, self.rows.format, self._observe)
        return OneNetwork(self.settings, self.rows.format, self._observe)

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one; the number of steps it stands for."""
        self.store.newest(self.settings.identity)  # refuses what nothing may be cleared away for
        if self.ranks.first:
            self.store.clear_partial()
        self.ranks.barrier()
        done = self._load_newest()
        if self.ranks.first:
            self.log.cut(done)
        self.ranks.barrier()
        return done

    def _load_newest(self) -> int:
        """Damaged ones are left out, as long as there are others."""
        while (commit := self.store.newest(self.settings.identity)) is not None:
            try:
                self._load_checkpoint(commit)
                return commit.step
            except Damaged as damage:
                if len(self.store.committed()) == 1:
                    raise self.store.hopeless(damage) from None
                self.ranks.barrier()
                if self.ranks.first:
                    self.link.warn(f"{damage} The run goes on from the checkpoint before.")
                    self.store.discard(commit.step)
                self.ranks.barrier()
        return 0

    def _load_checkpoint(self, commit: Commit) -> None:
        self.link.enter(f"loading the checkpoint of step {commit.step}")
        load_shards(self.engine, self.store, commit, self.ranks, self.token)

    # A step ---------------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> StepRecord | None:
        """Run a 0-based step; None when asked to stop before it was done (its gradients are dropped)."""
        begun, measures = time.perf_counter(), self.measures
        self.heart.at(step, 0, self.settings.micro_steps)
        measures.begin()
        self.non_finite.begin()
        with measures.phase("data"):
            micro = self.batches.of(step)
            totals = self.batches.totals(micro)
        rate = self.settings.learning_rate_at(step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        scale = self.ranks.world * self.engine.gradient_accumulation_steps() / max(totals.scored_tokens, 1)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        mean, norm = 0.0, None
        for index, one in enumerate(micro):
            self.heart.at(step, index + 1, len(micro))
            if self.ranks.any(self.link.stop_requested()):
                return None
            torch.manual_seed(_seed_of(self.settings.seed, step, self.ranks.rank, index))
            last = index == len(micro) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            with measures.phase("data"):
                batch = self.method.moved(one.batch, self.device)
            with measures.phase("forward"):
                part = self.method.loss(self.engine, batch)
            loss += part.detach()
            if last:
                mean = self.ranks.total_float(float(loss)) / max(totals.scored_tokens, 1)
            with measures.phase("backward"):  # NaN: no rank takes this step
                self.engine.backward(part * (scale if math.isfinite(mean) else math.nan))
            with measures.phase("optimizer"):
                norm = finish_step(self.engine) if last else self.engine.step()
        skipped = self.non_finite.judge(step, mean, norm, micro)
        if skipped is not None and self.ranks.first:
            self.link.warn(f"step {step + 1} is left out: its loss or gradient is not finite (samples {skipped})")
        seconds = time.perf_counter() - begun
        figures = measures.end(self.ranks, [one.batch for one in micro], seconds, totals.scored_tokens)
        if skipped is not None:
            figures |= {"loss_by_noise": None, "ar_loss": None}
        return StepRecord(
            step=step + 1,
            loss=mean if skipped is None else None,
            supervised_tokens=totals.supervised_tokens,
            scored_tokens=totals.scored_tokens if self.settings.objective == "two_tower" else None,
            batch_hash=totals.batch_hash,
            learning_rate=rate,
            grad_norm=norm,
            tokens_per_second=totals.tokens / seconds,
            skipped=skipped,
            seconds=seconds,
            time=time.time(),
            **figures,
        )

    def _observe(self, batch: Batch, losses: Tensor) -> None:
        """Shown every forward's losses, [N]."""
        self.non_finite.observe(batch, losses)
        self.measures.observe(batch, losses)

    def _told(self, record: StepRecord) -> None:
        """A step is done: evaluate where that is due, write the line, say so."""
        if self.settings.evaluation.due(record.step, self.settings.steps):
            found = self._evaluate(record.step)
            record = replace(
                record,
                held_out_loss=found.loss,
                held_out_bound=found.bound,
                held_out_perplexity=found.perplexity,
            )
        if self.ranks.first:
            self.log.append(record)
        self.link.publish(record)

    def _evaluate(self, done: int) -> Figures:
        """Figures on held-out rows after `done` steps, and samples on disk."""
        self.link.enter(f"evaluating after step {done}")
        figures = self.evaluation.figures(self.engine)
        samples = self.evaluation.samples(done)
        if self.ranks.first:
            self.log.append_samples(samples)
        self.link.enter("training")
        return figures

    # Keeping --------------------------------------------------------------------------------------------------------

    def _saves_after(self, done: int, *, stopped: bool) -> bool:
        return stopped or done % self.settings.checkpoint_every == 0 or done == self.settings.steps

    def _save(self, done: int) -> None:
        """Commit the state after `done` steps, with the metrics up to there."""
        self.link.enter(f"saving the checkpoint of step {done}")
        if self.ranks.first:
            self.log.publish()
        self.store.save(
            done,
            self.settings.identity,
            self.ranks,
            self._write_state,
            self.checkpoint_bytes,
        )
        self.link.enter("training")

    def _write_state(self, folder: str) -> list[str]:
        """This rank's shards and, once, what network they are of: a checkpoint can be exported without its run."""
        names = save_shards(self.engine, folder, self.store.patient)
        if self.ranks.first:
            described = Path(folder, DESCRIPTION)
            self.method.describe(described)
            names += [path.relative_to(folder).as_posix() for path in described.rglob("*") if path.is_file()]
        return names

    def _checkpoint_bytes(self) -> int:
        """Called before parameters are shared out."""
        counts = {True: 0, False: 0}
        for parameter in self.method.module.parameters():
            counts[parameter.requires_grad] += parameter.numel()
        stage, width = self.settings.zero_stage, DTYPES[self.settings.dtype].itemsize
        return checkpoint_bytes(counts[True], counts[False], zero_stage=stage, width=width)

    def _finish(self) -> None:
        self.link.enter("writing the model")
        if self.ranks.first:
            self.log.publish()
        self.method.publish(self.ranks, self.settings.output, self.fence.check)
        self.ranks.barrier()
        self.link.enter("done")


def _seed_of(seed: int, step: int, rank: int, index: int) -> int:
    """For layers that draw at random (dropout): a seed that a resumed run meets again."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
