"""The published layout of TwoTower (nvidia/Nemotron-Labs-TwoTower-30B-A3B-Base-BF16): both towers in one checkpoint.

    context_tower.*     -> context tower, model.*          context_lm_head.weight -> its lm_head.weight
    denoiser_tower.*    -> denoiser, model.*               lm_head.weight         -> its lm_head.weight
    t_embedder.mlp.{0,2}, t_block.1, scale_shift_tables.{i} -> time conditioning
    ...experts.{e}.up_proj.weight, down_proj.weight         -> one stacked tensor a projection

The mask token is 3, and modulation stands before the norm in attention and Mamba layers ("published" order). Tested on
miniatures with the published names and scaled shapes; never on the real 118 GB.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from model.attention import register_attention
from model.errors import UserError
from model.sources import fetch_model, first_line
from model.two_tower.config import TwoTowerConfig
from model.two_tower.towers import ContextTower, Denoiser, TwoTower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURE = "NemotronHTwoTowerForCausalLM"
MASK_TOKEN_ID = 3
BLOCK_SIZE = 16
CONTEXT, DENOISER, TIME = "context", "denoiser", "time"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight")
TIME_NAMES = {
    "t_embedder.mlp.0": "embedder.0",
    "t_embedder.mlp.2": "embedder.2",
    "t_block.1": "projection",
}


def is_published(folder: Path) -> bool:
    """Whether config.json describes a checkpoint in this layout."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and ARCHITECTURE in (values.get("architectures") or ())


def map_name(name: str) -> tuple[str, str]:
    """(part, name in that part) of a published tensor; experts and tables keep their number at the end.

    Raises UserError for a name that the layout does not have.
    """
    for prefix, part in (("context_tower.", CONTEXT), ("denoiser_tower.", DENOISER)):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return part, "model." + re.sub(r"^embedding\.", "embeddings.", rest)
    if name == "context_lm_head.weight":
        return CONTEXT, "lm_head.weight"
    if name == "lm_head.weight":
        return DENOISER, name
    if name.startswith("scale_shift_tables."):
        return TIME, name.replace("scale_shift_tables", "tables")
    module, _, kind = name.rpartition(".")
    if module in TIME_NAMES:
        return TIME, f"{TIME_NAMES[module]}.{kind}"
    raise UserError(f"{name} is no tensor of the published TwoTower layout.")


def regroup(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Published tensors by part, under the names of our modules; experts and tables stacked."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    stacks: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    for published, tensor in tensors.items():
        part, name = map_name(published)
        if expert := EXPERT.fullmatch(name):
            stacks[part, f"{expert[1]}.{expert[3]}"][int(expert[2])] = tensor
        elif part == TIME and name.startswith("tables."):
            stacks[part, "tables"][int(name.rpartition(".")[2])] = tensor
        else:
            parts[part][name] = tensor
    for (part, name), numbered in stacks.items():
        missing = set(range(max(numbered) + 1)) - set(numbered)
        if missing:
            raise UserError(f"the published checkpoint lacks number {min(missing)} of {name}.")
        parts[part][name] = torch.stack([numbered[i] for i in range(len(numbered))])
    return parts


def load_published(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    context_device: str = "cpu",
    denoiser_device: str = "cpu",
    block_size: int = BLOCK_SIZE,
    order: str = "published",
    **config: Any,
) -> TwoTower:
    """Both towers of a published checkpoint (folder, URI or Hub id), in eval mode. config: overrides of config.json.

    Raises UserError where names or shapes are not those of the layout.
    """
    folder = fetch_model(source)
    if not is_published(folder):
        raise UserError(f"{folder} is no published TwoTower checkpoint: its config.json does not name {ARCHITECTURE}.")
    parts = regroup(dict(_tensors(folder)))
    towers = []
    for part, device in ((CONTEXT, context_device), (DENOISER, denoiser_device)):
        causal_lm = _empty(folder, dtype, config)
        _fill(causal_lm, parts[part], f"{folder}, {part} tower")
        towers.append(causal_lm.to(device).eval())
    denoiser = Denoiser(towers[1], order)
    _fill(denoiser.time, parts[TIME], f"{folder}, time conditioning")
    return TwoTower(ContextTower(towers[0]), denoiser.eval(), TwoTowerConfig(block_size, MASK_TOKEN_ID, order))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no safetensors weights.")
    try:
        with ExitStack() as stack:
            for path in files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise UserError(f"{folder}: a safetensors file is damaged: {first_line(error)}") from error


def _empty(folder: Path, dtype: torch.dtype, overrides: dict[str, Any]) -> PreTrainedModel:
    """A tower without weights."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, **overrides)
    config.architectures = ["NemotronHForCausalLM"]
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register_attention(), trust_remote_code=False
        )
    return model


def _fill(module: torch.nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Give a module its tensors, without copying those that have its dtype. It must hold exactly these."""
    own = module.state_dict()
    for kind, names in (("lacks", own.keys() - tensors.keys()), ("holds the unexpected", tensors.keys() - own.keys())):
        if names:
            raise UserError(f"{what} {kind} tensor {min(names)}: config and weights do not belong together.")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise UserError(f"{what}: {name} is {tuple(tensor.shape)}, but config asks for {tuple(own[name].shape)}.")
    module.load_state_dict({name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}, assign=True)
