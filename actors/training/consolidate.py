"""Whole weights from a checkpoint of a run: DeepSpeed's shards put together again, without starting a training.

A checkpoint is trusted: it is the state of a run that this project wrote, and torch unpickles it. Its folder `model/`
describes the network (config and tokenizer, no weights); the shards hold a float32 master copy of every weight, in one
piece a rank. `read_weights` is the only place that knows how they lie.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor

from actors.training.checkpoints import COMMIT, FOLDER, CheckpointStore, noted
from actors.training.shards import TAG
from model.checksums import differing
from model.errors import UserError
from model.sources import first_line

DESCRIPTION = "model"
WHOLE_MODULE = "mp_rank_00_model_states.pt"  # DeepSpeed's name, where every rank has all weights
WRAPPED = "causal_lm."  # the name of the network inside TrainingModel
LORA = "lora.json"
BASE, FACTOR = ".base_layer.", ".lora_"
DAMAGED = (RuntimeError, ValueError, OSError, EOFError, KeyError, IndexError, pickle.UnpicklingError)
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint's local folder, and how many steps it stands for."""

    folder: Path
    step: int

    @property
    def description(self) -> Path:
        """The folder with config.json and tokenizer. Raises UserError where the checkpoint has none."""
        found = self.folder / DESCRIPTION
        if not (found / "config.json").is_file():
            raise UserError(
                f"{self.folder} does not describe its model (no {DESCRIPTION}/config.json): it was written by an older "
                "version; run adapt once more on its output, which writes a new checkpoint."
            )
        return found

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every weight by its name in the network; of a run that trains a low-rank adapter, with it merged in.

        Raises UserError where a file is not what was written.
        """
        checksums = noted(self.folder)
        for name in differing(checksums, self.folder, checksums):
            raise UserError(
                f"{self.folder} is damaged: {name} is not what was written (its checksum is another): take another "
                "checkpoint."
            )
        told = self.folder / DESCRIPTION / LORA
        read = torch.float32 if told.is_file() else dtype
        weights = {name.removeprefix(WRAPPED): tensor for name, tensor in read_weights(self.folder, read)}
        if not told.is_file():
            return weights
        scale = float(json.loads(told.read_text(encoding="utf-8"))["scale"])
        return {name: tensor.to(dtype) for name, tensor in merge_lora(weights, scale).items()}


def is_checkpoint(source: str) -> bool:
    """Whether a path or URI is a committed checkpoint of a run."""
    if "://" not in source and not Path(source).expanduser().is_dir():
        return False
    filesystem, root = url_to_fs(source)
    return bool(filesystem.exists(f"{root.rstrip('/')}/{COMMIT}"))


@contextlib.contextmanager
def open_checkpoint(source: str) -> Iterator[OpenCheckpoint]:
    """The checkpoint at `<output>/checkpoints/step_N`. Raises UserError where it is not whole, or lies elsewhere."""
    output, _, name = source.rstrip("/").rpartition(f"/{FOLDER}/")
    if not output:
        raise UserError(f"{source} is a checkpoint outside its run: give it as <output>/{FOLDER}/step_N.")
    store = CheckpointStore(output, keep=1)
    for damage in store.damaged():
        if damage.place.rpartition("/")[2] == name:
            raise UserError(f"{damage} Take another checkpoint.")
    for commit in store.committed():
        if store.place(commit.step).rpartition("/")[2] == name:
            with store.opened(commit) as folder:
                yield OpenCheckpoint(Path(folder), commit.step)
            return
    raise UserError(f"{source} is not whole: it has no {COMMIT}; take another checkpoint.")


def describe_lora(folder: Path, *, rank: int, alpha: float) -> None:
    """Note in a checkpoint's description how much its adapter counts."""
    (folder / LORA).write_text(json.dumps({"rank": rank, "alpha": alpha, "scale": alpha / rank}), encoding="utf-8")


def merge_lora(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of a model that peft has put a low-rank adapter into, with the adapter added and its names undone.

    peft names a module's own weight `M.base_layer.weight` and the factors `M.lora_A.default.weight` [rank, in] and
    `M.lora_B.default.weight` [out, rank]; scale * B A is added.
    """
    merged = {name.replace(BASE, "."): tensor for name, tensor in weights.items() if FACTOR not in name}
    for name, down in weights.items():
        if name.endswith(DOWN):
            module = name.removesuffix(DOWN)
            up = weights[f"{module}{UP}"]
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + scale * (up @ down)
    return merged


def read_weights(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name in the trained module, tensor) of every weight; one at a time is whole in memory.

    From the float32 master copy where ranks share one out. Where they do not (stage 0; stage 1 in bfloat16, which
    DeepSpeed gives to another optimizer) from the module's own weights, in the run's format.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    shards = Path(folder, TAG)
    try:
        found = _master_copy(folder) if _is_shared_out(shards) else _load(shards / WHOLE_MODULE)["module"]
    except DAMAGED as error:
        raise UserError(
            f"{folder} is damaged, its shards cannot be read ({first_line(error)}): take another checkpoint."
        ) from error
    whole: dict[int, Tensor] = {}
    for name, tensor in found.items():
        if id(tensor) not in whole:  # tied weights are one object under two names
            whole[id(tensor)] = tensor.contiguous().to(dtype)
        yield name, whole[id(tensor)]


def _is_shared_out(shards: Path) -> bool:
    """Whether DeepSpeed's ZeRO optimizer wrote the shards: its states name their stage."""
    states = sorted(shards.glob("*optim_states.pt"))
    return bool(states) and "zero_stage" in _load(states[0])["optimizer_state_dict"]


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return content


def _master_copy(folder: Path) -> dict[str, Any]:
    """Every weight in float32, put together when it is asked for."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        lazy: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG, lazy_mode=True)
    return lazy
