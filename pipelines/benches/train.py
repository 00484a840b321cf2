"""The training step: three structured streams against the published form, same rows, weights, precision and threads.

A step is what training pays for: laying out the batch, forward, loss, backward. Three forms:

    reference       two rows of 2L a data row, dense mask through SDPA, the head over both noisy halves
    three streams   [clean | noisy_1 | noisy_2], structured attention, the head at supervised positions
    trained         the same without the blocks that no loss reads: what adapt runs

on two kinds of rows: `full`, one document a row and every token supervised, the hardest case for us; and `tasks`,
packed generated tasks, as the demo trains on. Loss and gradient norm must agree, or the bench fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from model.backbone import DTYPES, Backbone, load_backbone, make_block_diffusion
from model.corruption import draw_noise, row_generator
from model.errors import JobError, UserError
from model.layout import RowBatch
from model.objective import BlockDiffusion, TrainingModel, to_device
from pipelines.assessment.held_out import pack_tasks
from pipelines.benches.reference import reference_loss
from pipelines.benches.result import BenchConfig, Result, device_name, machine, model_of
from pipelines.benches.timing import Times, take_turns
from pipelines.chats.rows import RowFormat
from pipelines.tasks import generate

TASK_TOKENS = 32  # a generated task with its answer is not shorter, so this many fill a row
REFERENCE, STREAMS, TRAINED = "reference", "three streams", "trained"
LOSS_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4, "float64": 1e-9}  # relative
NORM_TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-5}  # transformers rounds to float32 inside


class TrainBenchConfig(BenchConfig):
    """Time the training step against the published form: tokens/s of forward and backward, with equal loss."""

    output_name: ClassVar[str] = "bench/train.json"

    length: int = Field(1024, ge=2, description="tokens in a row")
    block_size: int = Field(32, ge=2, description="tokens in a block")
    rows: int = Field(1, ge=1, description="data rows in a step")
    layers: tuple[int, ...] = Field((0,), description="decoder layers to keep, one variant each; 0 keeps all")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("bfloat16", description="number format of the step")


@dataclass(frozen=True)
class Case:
    """One comparison: a model of some layers on one kind of rows."""

    kind: str
    backbone: Backbone
    rows: RowBatch
    mask: Tensor

    @property
    def layers(self) -> int:
        return len(self.backbone.model.get_decoder().layers)

    @property
    def title(self) -> str:
        return f"{self.kind} rows, {self.layers} layer{'' if self.layers == 1 else 's'}"


@dataclass(frozen=True)
class Step:
    """What a step computed. tokens: what the network ran on; loss: mean nats per supervised token."""

    loss: float
    gradient_norm: float
    tokens: int


def run_train(config: TrainBenchConfig) -> Result:
    """Measure all cases. Raises JobError where the forms disagree."""
    if config.length % config.block_size:
        raise UserError(f"--length {config.length} is not a multiple of --block_size {config.block_size}.")
    source, name = model_of(config)
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for layers in config.layers:
        backbone = _backbone(source, layers, config)
        for kind in ("full", "tasks"):
            case = _case(kind, backbone, config)
            times, steps = _measure(case, config)
            table += [_line(case, form, times, steps[form]) for form in steps]
            for form in (STREAMS, TRAINED):
                ratios[f"{form} over {REFERENCE}, {case.title}"] = times.ratio(REFERENCE, form)
    note = f"One training step of {name}, {config.rows} x {config.length} tokens, blocks of {config.block_size}."
    return Result("train", machine(config.dtype), config.rounds, table, ratios, note)


def _backbone(source: str, layers: int, config: TrainBenchConfig) -> Backbone:
    """The model with its first `layers` decoder layers (0: all), as a block-diffusion model in training mode."""
    backbone = load_backbone(source, dtype=DTYPES[config.dtype], device=device_name())
    decoder = backbone.model.get_decoder()
    if layers > len(decoder.layers) or layers < 0:
        raise UserError(f"--layers {layers}: {backbone.name} has {len(decoder.layers)} layers.")
    if layers:
        decoder.layers = decoder.layers[:layers]
        backbone.model.config.get_text_config().num_hidden_layers = layers
    backbone.model.train()
    if backbone.block_diffusion is not None:  # its own block size is no matter of a step's time
        backbone = replace(backbone, block_diffusion=replace(backbone.block_diffusion, block_size=config.block_size))
    return make_block_diffusion(backbone, block_size=config.block_size, trained_context_length=None)


def _case(kind: str, backbone: Backbone, config: TrainBenchConfig) -> Case:
    rows = _full_rows(backbone, config) if kind == "full" else _task_rows(backbone, config)
    noise = (draw_noise(config.length, config.block_size, row_generator(config.seed, i, 0)) for i in range(config.rows))
    return Case(kind, backbone, rows, torch.stack([mask for _, mask in noise]))


def _full_rows(backbone: Backbone, config: TrainBenchConfig) -> RowBatch:
    """Random ids, one document a row, all supervised."""
    shape = (config.rows, config.length)
    vocabulary = backbone.model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(config.seed))
    positions = torch.arange(config.length).expand(shape).contiguous()
    return RowBatch(ids, ids.clone(), torch.zeros_like(ids), positions)


def _task_rows(backbone: Backbone, config: TrainBenchConfig) -> RowBatch:
    adapted = backbone.block_diffusion
    assert adapted is not None, "_backbone makes it one"
    count = config.rows * max(1, config.length // TASK_TOKENS)
    form = RowFormat(config.block_size, config.length, adapted.mask_token_id)
    rows = pack_tasks(list(generate("train", count, config.seed)), backbone.tokenizer, form)
    return RowBatch(*(x[: config.rows] for x in (rows.input_ids, rows.labels, rows.document_ids, rows.position_ids)))


FORMS: dict[str, Callable[[Case], tuple[Tensor, int]]] = {
    REFERENCE: lambda case: _reference(case),
    STREAMS: lambda case: _structured(case, keep_all=True),
    TRAINED: lambda case: _structured(case, keep_all=False),
}


def _measure(case: Case, config: TrainBenchConfig) -> tuple[Times, dict[str, Step]]:
    """Times of the three forms and what each computed."""
    steps: dict[str, Step] = {}

    def step(form: str) -> None:
        case.backbone.model.zero_grad(set_to_none=True)
        loss, tokens = FORMS[form](case)
        loss.backward()
        if form not in steps:
            steps[form] = Step(loss.item() / max(1, case.rows.supervised_tokens), _gradient_norm(case), tokens)

    for form in FORMS:  # warm-up on short rows: the same code, an eighth of the time
        FORMS[form](_shortened(case))[0].backward()
    title = f"train: {case.title}"
    times = take_turns({form: partial(step, form) for form in FORMS}, config.rounds, warm_up=0, title=title)
    case.backbone.model.zero_grad(set_to_none=True)
    for form in (STREAMS, TRAINED):
        check_equal(case.title, form, steps[form], steps[REFERENCE], config.dtype)
    return times, {form: steps[form] for form in FORMS}


def _shortened(case: Case) -> Case:
    """The first quarter of the rows, in whole blocks."""
    adapted = case.backbone.block_diffusion
    assert adapted is not None, "_backbone makes it one"
    length = max(1, case.mask.shape[1] // adapted.block_size // 4) * adapted.block_size
    rows = case.rows
    cut = (x[:, :length] for x in (rows.input_ids, rows.labels, rows.document_ids, rows.position_ids))
    return replace(case, rows=RowBatch(*cut), mask=case.mask[:, :length])


def _reference(case: Case) -> tuple[Tensor, int]:
    adapted = case.backbone.block_diffusion
    assert adapted is not None, "_backbone makes it one"
    loss = reference_loss(case.backbone.model, case.rows, case.mask, adapted.mask_token_id, adapted.block_size)
    return loss, 4 * case.rows.input_ids.numel()


def _structured(case: Case, *, keep_all: bool) -> tuple[Tensor, int]:
    adapted = case.backbone.block_diffusion
    assert adapted is not None, "_backbone makes it one"
    objective = BlockDiffusion(
        adapted.block_size, adapted.mask_token_id, seed=0, last_layer=case.layers - 1, keep_all=keep_all
    )
    batch = objective.corrupted(case.rows, case.mask, range(len(case.rows.input_ids)))
    loss: Tensor = TrainingModel(case.backbone.model)(to_device(batch, case.backbone.device))
    return loss, batch.tokens


def _gradient_norm(case: Case) -> float:
    gradients = [p.grad for p in case.backbone.model.parameters() if p.grad is not None]
    return float(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm())


def check_equal(title: str, form: str, step: Step, reference: Step, dtype: str) -> None:
    """Raises JobError unless loss and gradient norm agree to the tolerance of the number format."""
    for name, tolerance in (("loss", LOSS_TOLERANCE[dtype]), ("gradient_norm", NORM_TOLERANCE[dtype])):
        ours, theirs = getattr(step, name), getattr(reference, name)
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            raise JobError(
                f"{title}: the {name} of `{form}` is {ours}, that of the reference {theirs}: not the same step."
            )


def _line(case: Case, form: str, times: Times, step: Step) -> dict[str, Any]:
    seconds = times.median(form)
    return {
        "rows": case.kind,
        "layers": case.layers,
        "form": form,
        "network tokens": step.tokens,
        "seconds": seconds,
        "data tokens/s": case.rows.input_ids.numel() / seconds,
        "over reference": times.ratio(REFERENCE, form),
        "loss": step.loss,
        "gradient norm": step.gradient_norm,
    }
