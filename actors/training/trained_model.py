"""The result of a training run: one consolidated Hugging Face folder, proven to load, that appears by rename."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fsspec.core import url_to_fs
from torch import Tensor

from model.backbone import Backbone, load_backbone, save_backbone
from model.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDER = "model"


def publish_model(backbone: Backbone, weights: Mapping[str, Tensor], output: str, guard: Callable[[], None]) -> None:
    """Write `<output>/model` from whole weights by name, load it again and compare, then give it its name.

    guard: called before the name is given. Raises JobError where what was written does not load as what was trained.
    """
    publish_folder(output, FOLDER, lambda folder: _write(backbone, weights, folder), guard)


def publish_folder(output: str, name: str, write: Callable[[Path], None], guard: Callable[[], None]) -> None:
    """Let `write` make a folder, then call guard, then give it its name below the output."""
    filesystem, root = url_to_fs(output)
    place = f"{root.rstrip('/')}/{name}"
    if "file" in filesystem.protocol:
        partial = Path(place).with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            write(partial)
            guard()
            shutil.rmtree(place, ignore_errors=True)
            partial.rename(place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return
    with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
        write(Path(scratch, name))
        guard()
        filesystem.put(f"{scratch}/{name}", place, recursive=True)


def _write(backbone: Backbone, weights: Mapping[str, Tensor], folder: Path) -> None:
    save_backbone(replace(backbone, model=rebuild(backbone.model, weights)), folder)
    loaded = dict(load_backbone(folder, dtype=next(iter(weights.values())).dtype).model.named_parameters())
    different = [
        name for name, tensor in weights.items() if name not in loaded or not same_weight(loaded[name], tensor)
    ]
    if different:
        raise JobError(f"The model written to {folder} does not load as it was trained ({different[0]} differs).")


def same_weight(one: Tensor, other: Tensor) -> bool:
    """Whether a loaded weight is the trained one, a NaN a NaN: a base model may hold some in rows that nobody uses.

    What transformers loads in float32 whatever is asked for (a router) may have been trained in another format.
    """
    alike = one.to(other.dtype) if one.dtype == torch.float32 else one
    return one.shape == other.shape and bool(torch.allclose(alike, other, rtol=0, atol=0, equal_nan=True))


def rebuild(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model of the same class and config that owns exactly these weights; its buffers are only fit for saving."""
    with torch.device("meta"):
        fresh = type(model)(model.config)
    saved = fresh.state_dict().keys()  # with the buffers that belong to a checkpoint, such as a router's bias
    buffers = {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in saved}
    fresh.load_state_dict({**buffers, **weights}, strict=False, assign=True)
    fresh.tie_weights()
    empty = [name for name, parameter in fresh.named_parameters() if parameter.is_meta]
    if empty:
        raise JobError(f"The trained model has no weights for {empty[0]}.")
    fresh.generation_config = model.generation_config
    return fresh
