"""Any Hugging Face causal LM as the body of a block-diffusion model: load, pick the mask token, adapt, save.

A model folder stays an ordinary Hugging Face folder: same `model_type`, same parameter names, with the extra key
"block_diffusion" in config.json. The published checkpoints' layout (`model_type: Fast_dLLM_Qwen`, `bd_size`, no mask
id) is read too. Weights are safetensors only and no remote code runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from model.adapters import adapter_block_diffusion, adapter_revision, merge_adapter
from model.checksums import note_weights
from model.config import CONFIG_KEY, BlockDiffusionConfig, default_sub_block
from model.errors import UserError
from model.published import PUBLISHED_MASK, base_config, is_published, published_adaptation
from model.sources import fetch_model, first_line
from model.weights import load_weights, quiet, take_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from model.writer import BlockWriter, StatefulForward

MASK_NAMES = (PUBLISHED_MASK, "<|mask|>", "<mask>", "[MASK]", "<|MASK|>")
SPARE_NAMES = (
    "<reponame>",
    "<jupyter_script>",
    "<|reserved_special_token_0|>",
    "<unused0>",
    "<|extra_0|>",
    "<|fim_pad|>",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Backbone:
    """A loaded model with its tokenizer. `block_diffusion` is None for a plain AR model; lengths in tokens.

    writer: of a TwoTower model, the network that fills the blocks; `model` then only reads. reader: how the engine runs
    `model` where its layers carry states from token to token.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    block_diffusion: BlockDiffusionConfig | None
    name: str
    revision: str
    context_length: int
    stop_token_ids: frozenset[int]
    writer: BlockWriter | None = None
    reader: StatefulForward | None = None

    @property
    def layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return self.model.device


def load_backbone(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    adapter: str | Path | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Backbone:
    """Load a model folder, URI or Hub id for inference (eval mode, no gradients needed).

    adapter: a LoRA adapter to merge into the weights, see `model.adapters`. weights: by name, to take instead of the
    folder's safetensors (it may hold none, as `save_description` leaves it).

    Raises UserError, one sentence, for a folder without config, without safetensors, with missing or unexpected
    weights, or whose "block_diffusion" does not fit its vocabulary.
    """
    folder = fetch_model(source)
    tokenizer = load_tokenizer(folder)
    config, block_diffusion = read_config(folder, tokenizer)
    model = load_weights(folder, config, dtype) if weights is None else take_weights(folder, config, dtype, weights)
    if adapter is not None:
        model = merge_adapter(model, adapter)
        block_diffusion = adapter_block_diffusion(adapter) or block_diffusion
    model = model.to(device).eval()
    if block_diffusion and block_diffusion.mask_token_id >= model.get_input_embeddings().num_embeddings:
        raise UserError(f"{folder}: mask_token_id {block_diffusion.mask_token_id} is outside the model's vocabulary.")
    return Backbone(
        model=model,
        tokenizer=tokenizer,
        block_diffusion=block_diffusion,
        name=str(source) if adapter is None else f"{source}+{adapter}",
        revision=revision_of(folder) if adapter is None else f"{revision_of(folder)}+{adapter_revision(adapter)}",
        context_length=context_length_of(config),
        stop_token_ids=_stop_tokens(model, tokenizer),
    )


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, URI or Hub id, without remote code. Raises UserError where none loads."""
    folder = fetch_model(source)
    try:
        with quiet():  # the published layout's model_type is unknown to transformers, which says so
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return tokenizer
    except StrictDataclassError as error:
        raise _bad_value(folder / "config.json", error) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: no tokenizer could be loaded ({first_line(error)})") from error


def read_config(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedConfig, BlockDiffusionConfig | None]:
    """config.json as (transformers config, block-diffusion config), from ours or the published layout."""
    values = _read_values(folder)
    config = _base_config(values, folder)
    if is_published(values):
        return config, published_adaptation(values, tokenizer, folder)
    block_diffusion = values.get(CONFIG_KEY)
    return config, None if block_diffusion is None else BlockDiffusionConfig.from_dict(block_diffusion)


def read_architecture(folder: Path) -> PreTrainedConfig:
    """config.json alone as a transformers config: what the network is, without tokenizer or weights."""
    return _base_config(_read_values(folder), folder)


def _read_values(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no config.json: give the folder of a Hugging Face model.") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable JSON: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(values).__name__}: it describes no model.")
    return values


def _base_config(values: dict[str, Any], folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    try:
        if is_published(values):
            return base_config(values)
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config
    except StrictDataclassError as error:
        raise _bad_value(path, error) from error
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"{path} describes no model that transformers knows: {first_line(error)}") from error


def _bad_value(path: Path, error: StrictDataclassError) -> UserError:
    return UserError(f"{path} holds a value that transformers refuses: {' '.join(str(error).split())}")


def context_length_of(config: PreTrainedConfig) -> int:
    """Longest sequence the model was made for, in tokens."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        if value := getattr(text, name, None):
            return int(value)
    return 2048


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found: set[int] = set()
    generation = model.generation_config.eos_token_id if model.generation_config else None
    for value in (model.config.get_text_config().eos_token_id, generation, tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, (list, tuple)) else {value} if value is not None else set()
    return frozenset(int(v) for v in found)


def revision_of(folder: Path) -> str:
    """Short hash of the config and of every weight file's header, size and edges (not of gigabytes of content).

    Raises UserError where a weight file's name leads to no file.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            raise UserError(f"{path} is no file that can be read (a link that leads nowhere?): restore the weights.")
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(1 << 20)
            file.seek(max(size - (1 << 20), 0))
            digest.update(f"{path.name}/{size}".encode() + head + file.read())
    return digest.hexdigest()


@dataclass(frozen=True)
class MaskToken:
    """The chosen mask token. `how`: "named", "spare" (an unused row) or "new" (the embedding must grow by one)."""

    token: str
    id: int
    how: str


def choose_mask_token(tokenizer: PreTrainedTokenizerBase, embedding_rows: int, reserved: Iterable[int]) -> MaskToken:
    """A token for [MASK] that is never eos, bos, pad or unk.

    First a token named like one, then an untrained embedding row behind the vocabulary (Qwen2.5: 151665), then a
    special token nobody uses (SmolLM2: <reponame>), else a new row. reserved: ids that must not be taken.
    """
    special = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    taken = {int(i) for i in (*special, *reserved) if i is not None}
    vocabulary = tokenizer.get_vocab()
    template = str(tokenizer.chat_template or "")
    for name in MASK_NAMES:
        if name in vocabulary and vocabulary[name] not in taken and vocabulary[name] < embedding_rows:
            return MaskToken(name, vocabulary[name], "named")
    if len(tokenizer) < embedding_rows:
        return MaskToken(PUBLISHED_MASK, len(tokenizer), "spare")
    for name in SPARE_NAMES:
        if name in vocabulary and name not in template and vocabulary[name] not in taken:
            return MaskToken(name, vocabulary[name], "spare")
    return MaskToken(PUBLISHED_MASK, len(tokenizer), "new")


def make_block_diffusion(backbone: Backbone, *, block_size: int, trained_context_length: int | None) -> Backbone:
    """The same network as a block-diffusion model: a mask token, and the config that says so.

    A model that already is one keeps its mask token; another block size than its own is refused with UserError.
    """
    existing = backbone.block_diffusion
    if existing is not None:
        if existing.block_size != block_size:
            raise UserError(
                f"{backbone.name} was adapted with block_size {existing.block_size}, not {block_size}: "
                f"set --pack.block_size {existing.block_size}, or start from the AR model."
            )
        return replace(backbone, block_diffusion=replace(existing, trained_context_length=trained_context_length))
    rows = backbone.model.get_input_embeddings().num_embeddings
    mask = choose_mask_token(backbone.tokenizer, rows, backbone.stop_token_ids)
    if mask.token not in backbone.tokenizer.get_vocab():
        backbone.tokenizer.add_special_tokens(
            {"extra_special_tokens": [mask.token]}, replace_extra_special_tokens=False
        )
    if mask.how == "new":
        backbone.model.resize_token_embeddings(rows + 1)
    config = BlockDiffusionConfig(
        block_size=block_size,
        mask_token_id=mask.id,
        sub_block_size=default_sub_block(block_size),
        trained_context_length=trained_context_length,
    )
    return replace(backbone, block_diffusion=config)


def save_backbone(backbone: Backbone, folder: Path) -> None:
    """Write a Hugging Face folder: safetensors, their checksums, config, tokenizer. It must not exist or be empty."""
    _note_adaptation(backbone)
    backbone.model.save_pretrained(folder)
    note_weights(folder)
    backbone.tokenizer.save_pretrained(folder)


def save_description(backbone: Backbone, folder: Path) -> None:
    """Everything of `save_backbone` but the weights, which may lie elsewhere or in shards."""
    _note_adaptation(backbone)
    model = backbone.model
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)


def _note_adaptation(backbone: Backbone) -> None:
    config = backbone.model.config
    if backbone.block_diffusion is None:
        config.__dict__.pop(CONFIG_KEY, None)
    else:
        setattr(config, CONFIG_KEY, backbone.block_diffusion.to_dict())
