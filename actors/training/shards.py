"""DeepSpeed's shards of a checkpoint: written by every rank, read back by as many, or re-cut for another number.

Re-cutting goes through DeepSpeed's universal checkpoint: every parameter and both its moments whole in a file of their
own, from which each rank reads its share. Traps met there (0.19.8): loading gives every group of weights the first
group's settings (the weight decay of matrices to gains and biases), and one step counter to all groups, which then
counts once a group instead of once a step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from actors.training.checkpoints import CheckpointStore, Commit
from actors.training.ranks import Ranks
from actors.training.storage import PATIENT, Patience

TAG = "zero"
UNIVERSAL = "universal"
STATE_BYTES = 12  # a trained parameter's float32 master copy and its two moments
SLACK_BYTES = 1 << 24  # the description; a tokenizer of 150,000 words takes 11 MB


def checkpoint_bytes(trained: int, frozen: int, *, zero_stage: int, width: int) -> int:
    """What the files of all ranks take on disk, about. trained, frozen: parameters; width: bytes of one in the run's
    own format, in which frozen ones are kept, and trained ones too where they are not the master copy themselves."""
    apart = trained if zero_stage in (1, 2) or (zero_stage == 0 and width < 4) else 0
    return trained * STATE_BYTES + (frozen + apart) * width + SLACK_BYTES


def save_shards(engine: Any, folder: str, patient: Patience = PATIENT) -> list[str]:
    """Write this rank's shards into `folder`; their names in it. Every rank calls it; a file that cannot be written is
    tried again."""
    with _patient_writer(engine.checkpoint_engine, patient) as written:
        engine.save_checkpoint(folder, tag=TAG, save_latest=False)
    return [Path(path).relative_to(folder).as_posix() for path in written]


@contextlib.contextmanager
def _patient_writer(writer: Any, patient: Patience) -> Iterator[list[str]]:
    """DeepSpeed's ranks wait for each other around their writing, so one file is tried again, not the whole save.

    Yields the paths of what is written, as it is."""
    once: Callable[..., None] = writer.save
    written: list[str] = []

    def save(state_dict: Any, path: str) -> None:
        patient(lambda: once(state_dict, path), f"writing {path}")
        written.append(path)

    writer.save = save
    try:
        yield written
    finally:
        del writer.save


def load_shards(engine: Any, store: CheckpointStore, commit: Commit, ranks: Ranks, token: str) -> None:
    """Give the engine the state of a checkpoint, whatever number of workers wrote it. Every rank calls it.

    token: names the run, for a folder that the ranks of a node share. Raises Damaged on all of them, before the engine
    is touched, where a file is not what was written.
    """
    if commit.workers == ranks.world or engine.zero_optimization_stage() == 0:  # 0: nothing is shared out

        def mine(name: str) -> bool:
            return _is_read_by(name, ranks.rank)

        with store.opened(commit, mine) as folder:
            store.check(folder, commit, mine, ranks)
            _load(engine, folder, TAG)
            ranks.barrier()
        return
    with _universal(store, commit, ranks, token) as folder:
        _load_universal(engine, folder)
        ranks.barrier()


def _load(engine: Any, folder: str, tag: str) -> None:
    loaded, _ = engine.load_checkpoint(folder, tag=tag)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")


def _is_read_by(name: str, rank: int) -> bool:
    """Whether a rank among as many needs a file: its own and those of all."""
    return "zero_pp_rank_" not in name or f"zero_pp_rank_{rank}_" in name


# Another number of workers --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _universal(store: CheckpointStore, commit: Commit, ranks: Ranks, token: str) -> Iterator[str]:
    """A folder with the checkpoint in universal form; one rank makes it where all see it, or one on every node."""
    if store.local:
        place = Path(store.root, f".step_{commit.step}.{UNIVERSAL}")
    else:
        place = Path(tempfile.gettempdir(), f"blockcast-{token}-step_{commit.step}")
    builds = ranks.first if store.local else ranks.local_rank == 0
    with store.opened(commit, lambda name: builds) as folder:
        store.check(folder, commit, lambda name: builds, ranks)
        if builds:
            shutil.rmtree(place, ignore_errors=True)
            to_universal(Path(folder, TAG), place / UNIVERSAL)
    ranks.barrier()
    try:
        yield str(place)
    finally:
        if builds:
            shutil.rmtree(place, ignore_errors=True)


def to_universal(source: Path, target: Path) -> None:
    """Convert shards in `source` in this process; DeepSpeed's converter starts others only when told to."""
    from deepspeed.checkpoint import ds_to_universal

    target.mkdir(parents=True)
    told = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(told)


def _load_universal(engine: Any, folder: str) -> None:
    """Load, then put right what DeepSpeed mixes up between groups; see the head of this file."""
    kept = [
        {name: value for name, value in group.items() if name != "params"} for group in engine.optimizer.param_groups
    ]
    engine._config.load_universal_checkpoint = True
    try:
        _load(engine, folder, UNIVERSAL)
    finally:
        engine._config.load_universal_checkpoint = False
    for group, own in zip(engine.optimizer.param_groups, kept, strict=True):
        group.update(own)
    for state in engine.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
