"""Small safetensors files beside the big ones: read for the tensors that are expected, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.errors import UserError
from model.sources import first_line


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors from wherever they lie."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of these names and shapes. Raises UserError where the file lacks one, holds another or is damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} lacks {path.name}: copy the model again.") from error
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from error
    lacking, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    for kind, names in (("lacks", lacking), ("holds the unexpected", unexpected)):
        if names:
            raise UserError(f"{path} {kind} tensor {min(names)}: it belongs to another model.")
    for name, tensor in tensors.items():
        if expected[name].shape != tensor.shape:
            needed = tuple(expected[name].shape)
            raise UserError(f"{path}: {name} is {tuple(tensor.shape)}, but the denoiser needs {needed}.")
    return tensors
