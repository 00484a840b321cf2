"""What a training step computes in each of its forms: the cases, the calls, and that they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.backbone import DTYPES, Backbone, load_backbone, make_block_diffusion
from model.config import BlockDiffusionConfig
from model.corruption import draw_noise, row_generator
from model.errors import JobError, UserError
from model.layout import RowBatch
from model.objective import BlockDiffusion, TrainingModel, to_device
from pipelines.assessment.held_out import pack_tasks
from pipelines.benches.reference import reference_loss
from pipelines.benches.result import device_name
from pipelines.chats.rows import RowFormat
from pipelines.tasks import generate

TASK_TOKENS = 32  # a generated task with its answer is not shorter, so this many fill a row
REFERENCE, STREAMS, TRAINED = "reference", "three streams", "trained"
KINDS = ("full", "tasks")
LOSS_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-9}  # relative
NORM_TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-5}  # transformers rounds to float32 inside


@dataclass(frozen=True)
class Shape:
    """What is stepped over. kind: of rows, one of KINDS; rows of `length` tokens in blocks; layers: 0 keeps all."""

    kind: str
    length: int
    rows: int
    layers: int
    block_size: int
    dtype: str
    seed: int


@dataclass(frozen=True)
class Case:
    """A loaded model and one global batch for it. mask: bool [B, L], what view 1 masks."""

    shape: Shape
    backbone: Backbone
    rows: RowBatch
    mask: Tensor

    @property
    def layers(self) -> int:
        return len(self.backbone.model.get_decoder().layers)

    @property
    def adapted(self) -> BlockDiffusionConfig:
        assert self.backbone.block_diffusion is not None, "load_model makes it one"
        return self.backbone.block_diffusion

    @property
    def title(self) -> str:
        shape, layers = self.shape, f"{self.layers} layer{'' if self.layers == 1 else 's'}"
        return f"{shape.kind} rows, {shape.rows} x {shape.length}, {layers}"


@dataclass(frozen=True)
class Step:
    """What a step computed. tokens: what the network ran on; loss: mean nats per supervised token."""

    loss: float
    gradient_norm: float
    tokens: int


def load_model(source: str, layers: int, block_size: int, dtype: str) -> Backbone:
    """The model with its first `layers` decoder layers (0: all), as a block-diffusion model in training mode."""
    backbone = load_backbone(source, dtype=DTYPES[dtype], device=device_name())
    decoder = backbone.model.get_decoder()
    if layers > len(decoder.layers) or layers < 0:
        raise UserError(f"--layers {layers}: {backbone.name} has {len(decoder.layers)} layers.")
    if layers:
        decoder.layers = decoder.layers[:layers]
        backbone.model.config.get_text_config().num_hidden_layers = layers
    backbone.model.train()
    if backbone.block_diffusion is not None:  # its own block size is no matter of a step's time
        backbone = replace(backbone, block_diffusion=replace(backbone.block_diffusion, block_size=block_size))
    return make_block_diffusion(backbone, block_size=block_size, trained_context_length=None)


def make_case(shape: Shape, backbone: Backbone) -> Case:
    """The batch that `shape` describes."""
    rows = full_rows(shape, backbone) if shape.kind == "full" else task_rows(shape, backbone)
    noise = (draw_noise(shape.length, shape.block_size, row_generator(shape.seed, i, 0)) for i in range(shape.rows))
    return Case(shape, backbone, rows, torch.stack([mask for _, mask in noise]))


def full_rows(shape: Shape, backbone: Backbone) -> RowBatch:
    """Random ids, one document a row, all supervised: the hardest case for us."""
    size = (shape.rows, shape.length)
    vocabulary = backbone.model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(shape.seed))
    positions = torch.arange(shape.length).expand(size).contiguous()
    return RowBatch(ids, ids.clone(), torch.zeros_like(ids), positions)


def task_rows(shape: Shape, backbone: Backbone) -> RowBatch:
    """Packed generated tasks, as the demo trains on."""
    assert backbone.block_diffusion is not None, "load_model makes it one"
    count = shape.rows * max(1, shape.length // TASK_TOKENS)
    form = RowFormat(shape.block_size, shape.length, backbone.block_diffusion.mask_token_id)
    rows = pack_tasks(list(generate("train", count, shape.seed)), backbone.tokenizer, form)
    return RowBatch(*(x[: shape.rows] for x in (rows.input_ids, rows.labels, rows.document_ids, rows.position_ids)))


def shortened(case: Case) -> Case:
    """The first quarter of the rows, in whole blocks: the same code, an eighth of the time."""
    block_size = case.shape.block_size
    length = max(1, case.mask.shape[1] // block_size // 4) * block_size
    rows = case.rows
    cut = (x[:, :length] for x in (rows.input_ids, rows.labels, rows.document_ids, rows.position_ids))
    return replace(case, rows=RowBatch(*cut), mask=case.mask[:, :length])


# Forms ----------------------------------------------------------------------------------------------------------------


def forward(case: Case, form: str) -> tuple[Tensor, int]:
    """(sum of cross-entropy over both views, tokens that the network ran on) of one form."""
    return FORMS[form](case)


def backward(case: Case, form: str) -> tuple[Tensor, int]:
    """The whole step from no gradients at all; they stay in the model. Returns what `forward` does."""
    case.backbone.model.zero_grad(set_to_none=True)
    loss, tokens = forward(case, form)
    loss.backward()
    return loss.detach(), tokens


def told(case: Case, loss: Tensor, tokens: int) -> Step:
    """What `backward` has just computed."""
    gradients = [p.grad for p in case.backbone.model.parameters() if p.grad is not None]
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm()
    return Step(loss.item() / max(1, case.rows.supervised_tokens), float(norm), tokens)


def _reference(case: Case) -> tuple[Tensor, int]:
    adapted = case.adapted
    loss = reference_loss(case.backbone.model, case.rows, case.mask, adapted.mask_token_id, adapted.block_size)
    return loss, 4 * case.rows.input_ids.numel()


def _structured(case: Case, *, keep_all: bool) -> tuple[Tensor, int]:
    adapted = case.adapted
    objective = BlockDiffusion(
        adapted.block_size, adapted.mask_token_id, seed=0, last_layer=case.layers - 1, keep_all=keep_all
    )
    batch = objective.corrupted(case.rows, case.mask, range(len(case.rows.input_ids)))
    loss: Tensor = TrainingModel(case.backbone.model)(to_device(batch, case.backbone.device))
    return loss, batch.tokens


FORMS: dict[str, Callable[[Case], tuple[Tensor, int]]] = {
    REFERENCE: _reference,
    STREAMS: lambda case: _structured(case, keep_all=True),
    TRAINED: lambda case: _structured(case, keep_all=False),
}


def check_equal(title: str, form: str, step: Step, reference: Step, dtype: str) -> None:
    """Raises JobError unless loss and gradient norm agree to the tolerance of the number format."""
    for name, tolerance in (("loss", LOSS_TOLERANCE[dtype]), ("gradient_norm", NORM_TOLERANCE[dtype])):
        ours, theirs = getattr(step, name), getattr(reference, name)
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            raise JobError(
                f"{title}: the {name} of `{form}` is {ours}, that of the reference {theirs}: not the same step."
            )
