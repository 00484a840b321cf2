"""Held-out loss of any model: masked (what block adaptation minimises) and next-token (what AR decoding lives on).

The rows are packed in memory from held-out tasks, or are the held-out rows that prepare wrote. A model that was not
adapted is measured with the mask token that adaptation would choose: that is the "before" of before and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from actors.training.rows import COLUMNS, PackedRows, RowFormat, holds_rows
from model.backbone import DTYPES, Backbone, load_backbone, make_block_diffusion
from model.config import BlockDiffusionConfig
from model.errors import UserError
from model.layout import RowBatch
from model.loading import weight_folders
from model.objective import held_out_loss, make_objective
from model.two_tower.folder import load_two_tower
from model.two_tower.training import TwoTowerObjective, held_out_bound
from pipelines.assessment.contenders import Subject
from pipelines.chats.over_long import fit
from pipelines.chats.pack import plan_rows
from pipelines.chats.records import Rejected, parse
from pipelines.chats.rows import IGNORED, Placed, build_rows
from pipelines.chats.template import ChatEncoder
from pipelines.jobkit.progress import Progress
from pipelines.tasks import Task, generate


@dataclass(frozen=True)
class HeldOutTasks:
    """Rows to be packed from `count` held-out tasks; sizes in tokens."""

    count: int
    seed: int
    context_length: int

    def rows(self, tokenizer: PreTrainedTokenizerBase, adapted: BlockDiffusionConfig) -> RowBatch:
        form = RowFormat(adapted.block_size, self.context_length, adapted.mask_token_id)
        return pack_tasks(list(generate("held_out", self.count, self.seed)), tokenizer, form)

    @property
    def text(self) -> str:
        return f"{self.count} held-out tasks"


@dataclass(frozen=True)
class HeldOutRows:
    """The first `most` packed rows of a folder (None: all)."""

    folder: str
    most: int | None

    def rows(self, tokenizer: PreTrainedTokenizerBase, adapted: BlockDiffusionConfig) -> RowBatch:
        packed = PackedRows(self.folder)
        for name in ("block_size", "mask_token_id"):
            theirs, ours = getattr(packed.format, name), getattr(adapted, name)
            if theirs != ours:
                raise UserError(
                    f"{self.folder} was packed with {name} {theirs}, the model has {ours}: prepare the rows for it."
                )
        return packed.rows(range(min(len(packed), self.most or len(packed))))

    @property
    def text(self) -> str:
        return "held-out rows"


def held_out_folder(folder: str) -> str:
    """The packed rows to measure on: those that prepare held out where the folder has them, else the folder's own."""
    inner = f"{folder.rstrip('/')}/held_out"
    return inner if holds_rows(inner) else folder


def pack_tasks(tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase, form: RowFormat) -> RowBatch:
    """Tasks as packed rows, as prepare would write them, in memory."""
    documents = [parse(task.chat(), "messages") for task in tasks]
    pieces = []
    for task, encoded in zip(tasks, ChatEncoder(tokenizer).encode(documents), strict=True):
        if isinstance(encoded, Rejected):
            raise UserError(f"The held-out task {task.id} does not fit the model's chat template: {encoded}.")
        pieces += fit(encoded, form.context_length, "split").pieces
    lengths = np.array([len(piece) for piece in pieces])
    plan = plan_rows(lengths, block_size=form.block_size, context_length=form.context_length, seed=0)
    placed = [
        Placed(
            i,
            int(plan.rows[i]),
            int(plan.starts[i]),
            piece.input_ids,
            np.where(piece.supervised, piece.input_ids, IGNORED),
        )
        for i, piece in enumerate(pieces)
    ]
    return row_batch(build_rows(placed, plan.row_count, form))


def row_batch(table: pa.Table) -> RowBatch:
    """An Arrow table of packed rows as int64 tensors [R, L]."""
    columns = (table.column(name).combine_chunks() for name in COLUMNS)
    flat = (column.flatten().to_numpy().astype(np.int64).reshape(len(table), -1) for column in columns)
    return RowBatch(*(torch.from_numpy(values) for values in flat))


def each_row(rows: RowBatch) -> Iterator[RowBatch]:
    """One row at a time: a forward's memory does not grow with their number."""
    for i in range(rows.input_ids.shape[0]):
        part = slice(i, i + 1)
        yield RowBatch(rows.input_ids[part], rows.labels[part], rows.document_ids[part], rows.position_ids[part])


def count_parameters(folder: Path) -> int:
    """Numbers in the safetensors of a model folder, tied ones once; of both towers, where it is two."""
    total = 0
    for path in (path for part in weight_folders(folder) for path in part.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def measure_losses(
    subject: Subject, source: HeldOutTasks | HeldOutRows, *, block_size: int, dtype: str, device: str, seed: int
) -> dict[str, Any]:
    """{"masked", "next_token"}: mean nats per supervised token, {"rows", "supervised_tokens"}: of how much.

    block_size: for a model that was not adapted; another one than an adapted model's own is refused with UserError.
    Of two towers, masked is the denoiser's loss at masked positions, as trained, next_token the context tower's; with
    {"bound"}, the bound of the nats per token that blocks cost.
    """
    if subject.two_tower:
        return _tower_losses(subject, source, DTYPES[dtype], device, seed)
    backbone = load_backbone(subject.source, dtype=DTYPES[dtype], device=device)
    backbone = make_block_diffusion(backbone, block_size=block_size, trained_context_length=None)
    adapted = backbone.block_diffusion
    assert adapted is not None, "make_block_diffusion gives every model its entry"
    rows = source.rows(backbone.tokenizer, adapted)
    objectives = ("block_diffusion", "next_token")
    title, total = f"assess: held-out loss of {subject.role}", len(objectives) * rows.input_ids.shape[0]
    with Progress(title, total=total, unit="rows") as progress:
        figures = {name: _loss(backbone, adapted, name, told(each_row(rows), progress), seed) for name in objectives}
    return {
        "masked": figures["block_diffusion"],
        "next_token": figures["next_token"],
        "rows": rows.input_ids.shape[0],
        "supervised_tokens": rows.supervised_tokens,
    }


def _tower_losses(
    subject: Subject, source: HeldOutTasks | HeldOutRows, dtype: torch.dtype, device: str, seed: int
) -> dict[str, Any]:
    assert subject.block_diffusion is not None, "a model of two towers writes blocks"
    loaded, blocks = load_two_tower(subject.source, dtype=dtype, device=device), subject.block_diffusion
    towers, context = loaded.towers, loaded.context
    rows = source.rows(loaded.tokenizer, blocks)
    objective = TwoTowerObjective(
        blocks.block_size, blocks.mask_token_id, seed, towers.context.recurrent, towers.config.token_shift
    )
    known = context.model.get_input_embeddings().num_embeddings  # the mask token may be the denoiser's alone
    clean = replace(rows, input_ids=rows.input_ids.masked_fill(rows.input_ids >= known, 0))
    with Progress(f"assess: held-out loss of {subject.role}", total=2 * len(rows.input_ids), unit="rows") as progress:
        held_out = held_out_bound(towers, objective, told(each_row(rows), progress))
        next_token = _loss(context, blocks, "next_token", told(each_row(clean), progress), seed)
    return {
        "masked": held_out.loss,
        "bound": held_out.bound,
        "next_token": next_token,
        "rows": rows.input_ids.shape[0],
        "supervised_tokens": rows.supervised_tokens,
    }


def told(rows: Iterable[RowBatch], progress: Progress) -> Iterator[RowBatch]:
    """The rows, each told when it is done with."""
    for row in rows:
        yield row
        progress.advance()


def _loss(backbone: Backbone, adapted: BlockDiffusionConfig, name: str, rows: Iterable[RowBatch], seed: int) -> float:
    objective = make_objective(
        name,
        block_size=adapted.block_size,
        mask_token_id=adapted.mask_token_id,
        seed=seed,
        layers=backbone.layers,
    )
    return held_out_loss(backbone.model, objective, rows)
