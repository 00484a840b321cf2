"""Weights into a network: from a folder's safetensors or from tensors in memory, whole or not at all.

Safetensors only, no remote code, and what does not match config.json is refused with one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from model.attention import register_attention
from model.checksums import check_weights
from model.errors import UserError
from model.sources import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_weights(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The network of a folder. Raises UserError where there are no safetensors, not those that config describes, or not
    those that were written."""
    if not list(folder.glob("*.safetensors")):
        other = [p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.gguf"))]
        found = f" (only {other[0]})" if other else ""
        raise UserError(f"{folder} holds no safetensors weights{found}: convert the model with save_pretrained first.")
    check_weights(folder)
    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=register_attention(),
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **_experts(dtype),
            )
    except SafetensorError as error:
        raise UserError(f"{folder}: a safetensors file is damaged: {first_line(error)}") from error
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{folder}: the weights could not be loaded: {first_line(error)}") from error
    _refuse_mismatch(folder, info)
    loaded: PreTrainedModel = model
    return loaded


def take_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, weights: Mapping[str, Tensor]
) -> PreTrainedModel:
    """The network that config describes with these weights by name. folder: what an error names.

    Raises UserError where a weight is missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    with quiet():
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=dtype,
            attn_implementation=register_attention(),
            output_loading_info=True,
            **_experts(dtype),
        )
    _refuse_mismatch(folder, info)
    loaded: PreTrainedModel = model
    return loaded


def _experts(dtype: torch.dtype) -> dict[str, str]:
    """How experts are computed: transformers' own choice, a grouped product, does not know float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and warnings: what matters is checked and told here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _refuse_mismatch(folder: Path, info: dict[str, Any]) -> None:
    for kind, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "holds the unexpected"),
        ("mismatched_keys", "has the wrong shape for"),
    ):
        names = sorted(str(k[0] if isinstance(k, tuple) else k) for k in info.get(kind) or ())
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"{folder} {what} weight {names[0]}{more}: config.json and the safetensors do not belong together."
            )
