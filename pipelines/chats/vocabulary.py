"""What the rows take from the model besides its tokenizer: the mask token that pads them, without loading weights."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from model.backbone import choose_mask_token, context_length_of, load_tokenizer, read_config
from model.demo_base import demo_base_model
from model.errors import UserError
from model.sources import fetch_model
from pipelines.chats.rows import RowFormat


def model_folder(model: str | None) -> Path:
    """Local folder of `--model`; None is the demo's base model."""
    return demo_base_model() if model is None else fetch_model(model)


def row_format(model: str | None, *, block_size: int, context_length: int) -> tuple[RowFormat, list[str]]:
    """The format of rows for a model, and notes for the user.

    The mask token is the one `model.backbone.make_block_diffusion` will take: an adapted model's own, else chosen from
    the vocabulary. A folder with a tokenizer and no config.json is taken to have a spare embedding row behind its
    vocabulary, as Qwen2.5 has. Raises UserError where an adapted model has another block size.
    """
    folder = model_folder(model)
    tokenizer = load_tokenizer(folder)
    if not (folder / "config.json").is_file():
        mask = choose_mask_token(tokenizer, len(tokenizer) + 1, ())
        note = f"{folder} holds a tokenizer only: rows are padded with the spare id {mask.id}."
        return RowFormat(block_size, context_length, mask.id), [note]
    config, adapted = read_config(folder, tokenizer)
    if adapted is None:
        rows = int(config.get_text_config().vocab_size)
        mask_token_id = choose_mask_token(tokenizer, rows, _stop_tokens(folder, config, tokenizer)).id
    elif adapted.block_size != block_size:
        raise UserError(
            f"{model} was adapted with block_size {adapted.block_size}, not {block_size}: "
            f"set --pack.block_size {adapted.block_size}, or start from the AR model."
        )
    else:
        mask_token_id = adapted.mask_token_id
    return RowFormat(block_size, context_length, mask_token_id), _notes(folder, config, context_length)


def _notes(folder: Path, config: PreTrainedConfig, context_length: int) -> list[str]:
    longest = context_length_of(config)
    if context_length <= longest:
        return []
    return [f"pack.context_length {context_length} is more than the {longest} positions {folder.name} was made for."]


def _stop_tokens(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end an answer, from all three places that can say so."""
    values = [config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        values.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    flat = (one for value in values for one in (value if isinstance(value, list | tuple) else [value]))
    return {int(one) for one in flat if one is not None}
