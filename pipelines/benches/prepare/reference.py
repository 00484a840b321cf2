"""The published way from chats to rows: `datasets.map` over conversations, then over the grouping.

The published training code renders each conversation with a template that marks what the assistant wrote, pads every
sample with the mask token to whole blocks (with a block too many where it is aligned already), concatenates the samples
of a batch and cuts them into rows; what is left at a batch's end is dropped. Samples lie across rows: METHOD section 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from model.errors import UserError
from pipelines.chats.rows import IGNORED, RowFormat

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Batch = Mapping[str, list[Any]]


@dataclass(frozen=True)
class Grouped:
    """What came out. tokens and supervised: of all samples; rows of context_length."""

    tokens: int
    supervised: int
    rows: int


def import_datasets() -> Any:
    """The package `datasets`. Raises UserError where it is not installed."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import datasets
    except ImportError:
        raise UserError("bench prepare compares with the package datasets: pip install 'datasets>=5.2,<6'.") from None
    datasets.disable_progress_bars()
    datasets.disable_caching()
    return datasets


def prepare_by_map(
    file: Path, cache: Path, tokenizer: PreTrainedTokenizerBase, form: RowFormat, workers: int | None = None
) -> Grouped:
    """Chats of a JSONL file to rows in Arrow files under `cache`. tokenizer: with the template MARKED."""
    datasets = import_datasets()
    chats = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
    samples = chats.map(
        _tokenize,
        batched=True,
        num_proc=workers,
        remove_columns=chats.column_names,
        fn_kwargs={"tokenizer": tokenizer},
    )
    rows = samples.map(_group, batched=True, num_proc=workers, fn_kwargs={"form": form})
    labels = pc.list_flatten(samples.data.column("labels"))
    supervised = pc.sum(pc.not_equal(labels, IGNORED)).as_py()
    return Grouped(len(labels), int(supervised or 0), len(rows))


def _tokenize(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Any]]:
    encoded = [
        tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
        )
        for messages in batch["messages"]
    ]
    masks = [one["assistant_masks"] for one in encoded]
    ids: list[Sequence[int]] = [one["input_ids"] for one in encoded]
    return {
        "input_ids": ids,
        "attention_mask": [one["attention_mask"] for one in encoded],
        "labels": [[i if m else IGNORED for i, m in zip(*pair, strict=True)] for pair in zip(ids, masks, strict=True)],
    }


def _group(batch: Batch, form: RowFormat) -> dict[str, list[Any]]:
    padding = {"input_ids": form.mask_token_id, "attention_mask": 1, "labels": IGNORED}
    joined = {
        name: list(chain.from_iterable(_padded(one, padding[name], form) for one in batch[name])) for name in batch
    }
    row = form.context_length
    whole = len(joined["input_ids"]) // row * row
    return {name: [values[at : at + row] for at in range(0, whole, row)] for name, values in joined.items()}


def _padded(sample: list[int], value: int, form: RowFormat) -> list[int]:
    return sample + [value] * (form.block_size - len(sample) % form.block_size)
