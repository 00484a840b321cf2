"""The layout of the published Fast-dLLM v2 checkpoints: Qwen2 under another name.

`model_type` is `Fast_dLLM_Qwen`, parameter names are Qwen2's, the block size is `bd_size`, and the mask token's id
stands nowhere: it is the id of `|<MASK>|` in the tokenizer. Such a folder names remote code in `auto_map`; none of it
is run or copied here. Sub-block size, token shift and trained length are no part of the layout: the method fixes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Qwen2Config

from model.config import BlockDiffusionConfig, default_sub_block
from model.errors import UserError

PUBLISHED_TYPE = "Fast_dLLM_Qwen"
PUBLISHED_MASK = "|<MASK>|"
PUBLISHED_BLOCK = 32
CODE = "Efficient-Large-Model/Fast_dLLM_v2_7B"  # where the published code lies on the Hub, for those who trust it
OTHER_KEYS = ("model_type", "auto_map", "architectures", "bd_size", "transformers_version")
SAME_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "attention_dropout",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def is_published(values: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json is in the published layout."""
    return values.get("model_type") == PUBLISHED_TYPE


def base_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """The Qwen2 config that a published config.json describes."""
    config = Qwen2Config(**{k: v for k, v in values.items() if k not in OTHER_KEYS})
    config.architectures = ["Qwen2ForCausalLM"]
    return config


def published_adaptation(
    values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> BlockDiffusionConfig:
    """How it was adapted. Raises UserError where the tokenizer knows no mask token."""
    mask = tokenizer.get_vocab().get(PUBLISHED_MASK)
    if mask is None:
        raise UserError(
            f"{folder}: a {PUBLISHED_TYPE} checkpoint needs {PUBLISHED_MASK} in its tokenizer, which is not there."
        )
    block_size = int(values.get("bd_size", PUBLISHED_BLOCK))
    return BlockDiffusionConfig(block_size, int(mask), sub_block_size=default_sub_block(block_size))


def published_values(config: PreTrainedConfig, block_size: int, dtype: str) -> dict[str, Any]:
    """config.json of a Qwen2 model in the published layout. dtype: of the weights."""
    values = config.to_dict()
    rope = dict(values.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", values.get("rope_theta", 10_000.0))
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "architectures": [f"{PUBLISHED_TYPE}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CODE}--configuration.{PUBLISHED_TYPE}Config",
            "AutoModel": f"{CODE}--modeling.{PUBLISHED_TYPE}Model",
            "AutoModelForCausalLM": f"{CODE}--modeling.{PUBLISHED_TYPE}ForCausalLM",
        },
        "model_type": PUBLISHED_TYPE,
        "bd_size": block_size,
        **{name: values[name] for name in SAME_KEYS if name in values},
        "rope_theta": theta,
        **({"rope_scaling": rope} if scaled else {}),
        "torch_dtype": dtype,
    }


def check_publishable(
    config: PreTrainedConfig, adapted: BlockDiffusionConfig | None, tokenizer: PreTrainedTokenizerBase, name: str
) -> BlockDiffusionConfig:
    """What the layout must express. Raises UserError where it cannot, saying what stands in the way."""
    if adapted is None:
        raise UserError(f"{name} was not adapted to block diffusion: the published layout is for adapted models.")
    if config.model_type != "qwen2":
        raise UserError(
            f"{name} is of model_type {config.model_type}: the published layout is Qwen2's, export it with "
            "--format transformers."
        )
    found = tokenizer.get_vocab().get(PUBLISHED_MASK)
    if found != adapted.mask_token_id:
        mask = tokenizer.convert_ids_to_tokens(adapted.mask_token_id)
        raise UserError(
            f"{name} has the mask token {mask!r} ({adapted.mask_token_id}): readers of the published layout look up "
            f"{PUBLISHED_MASK!r}, export it with --format transformers."
        )
    if not adapted.token_shift:
        raise UserError(f"{name} was adapted without the token shift, which the published layout takes for granted.")
    return adapted
