"""The attention of a training step alone, by row length: seconds, and peak memory of forward and backward.

    structured         one row of 3L, tiles and own blocks (what training runs on CPU)
    dense 3L           the same row under a dense [3L, 3L] mask, through SDPA
    dense 2 x 2L       the published shape: two rows of 2L under a dense [2L, 2L] mask, through SDPA
    flex               the same row of 3L through compiled flex attention; forward only on CPU, where it has no backward

The first, second and fourth must give the same output, or the bench fails. Masks and compilation are made before the
clock starts; peak memory is what the call itself needs, the mask it reads stands in a column of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from model.attention import StreamPlan, compiled_flex
from model.backbone import DTYPES
from model.errors import JobError, UserError
from model.layout import RowBatch
from model.masks import CLEAN, NOISY_1, stream_tokens
from model.objective import BlockDiffusion, to_device
from pipelines.benches.memory import peak_bytes
from pipelines.benches.reference import DensePlan, dense_bias
from pipelines.benches.result import BenchConfig, Result, device_name, machine
from pipelines.benches.timing import Times, take_turns

STRUCTURED, DENSE_3L, DENSE_2L, FLEX = "structured", "dense 3L", "dense 2 x 2L", "flex"
TOLERANCE = {"bfloat16": 3e-2, "float32": 1e-4, "float64": 1e-9}  # absolute; outputs are averages of normal numbers
MIB = 2**20
NO_LAYER = -1  # the last layer skips the clean queries; here every layer is one in the middle


class AttentionBenchConfig(BenchConfig):
    """Time the attention of a training step by row length, with peak memory."""

    output_name: ClassVar[str] = "bench/attention.json"

    lengths: tuple[int, ...] = Field((512, 1024, 2048), description="row lengths L in tokens")
    block_size: int = Field(32, ge=1, description="tokens in a block")
    heads: int = Field(9, ge=1, description="query heads")
    kv_heads: int = Field(3, ge=1, description="key and value heads, a divisor of the query heads")
    head_dim: int = Field(64, ge=1, description="width of a head")
    flex: bool = Field(True, description="also compiled flex attention (about 20 s to compile)")
    memory: bool = Field(True, description="also peak memory, by the growth of the process")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("bfloat16", description="number format")


@dataclass(frozen=True)
class Inputs:
    """query [B, H, T, D], key and value [B, Hkv, T, D], all with gradients."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def run_attention(config: AttentionBenchConfig) -> Result:
    """Measure all lengths. Raises JobError where the forms disagree."""
    if config.heads % config.kv_heads:
        raise UserError(f"--kv_heads {config.kv_heads} does not divide --heads {config.heads}.")
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for length in config.lengths:
        if length % config.block_size:
            raise UserError(f"--lengths {length} is not a multiple of --block_size {config.block_size}.")
        lines, found = _measure(length, config)
        table += lines
        ratios |= found
    note = f"{config.heads} heads of {config.head_dim} over {config.kv_heads}, blocks of {config.block_size}."
    return Result("attention", machine(config.dtype), config.rounds, table, ratios, note)


@dataclass(frozen=True)
class Form:
    """One way to attend: its call, what the gradients go to, and the bytes of the mask that it reads."""

    call: Callable[[], Tensor]
    inputs: Inputs
    mask_bytes: int = 0
    backward: bool = True

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call()

    def both(self) -> None:
        """Forward and backward."""
        for tensor in self.inputs.tensors:
            tensor.grad = None
        out = self.call()
        out.backward(torch.ones_like(out))


def _measure(length: int, config: AttentionBenchConfig) -> tuple[list[dict[str, Any]], dict[str, float]]:
    forms = _forms(length, config)
    _check_equal(length, forms, config.dtype)
    title = f"attention: L {length}, forward"
    forward = take_turns({name: form.forward for name, form in forms.items()}, config.rounds, title=title)
    both = {name: form.both for name, form in forms.items() if form.backward}
    trained = take_turns(both, config.rounds, title=f"{title} and backward")
    lines = [_line(length, name, form, forward, trained, config) for name, form in forms.items()]
    ratios = {
        f"{STRUCTURED} over {other}, L {length}": trained.ratio(other, STRUCTURED) for other in (DENSE_3L, DENSE_2L)
    }
    if FLEX in forms:
        ratios[f"{STRUCTURED} over {FLEX}, L {length}, forward"] = forward.ratio(FLEX, STRUCTURED)
    return lines, ratios


def _inputs(batch: int, tokens: int, config: AttentionBenchConfig) -> Inputs:
    generator = torch.Generator().manual_seed(config.seed)

    def normal(heads: int) -> Tensor:
        drawn = torch.randn((batch, heads, tokens, config.head_dim), generator=generator)
        return drawn.to(device_name(), DTYPES[config.dtype]).requires_grad_()

    return Inputs(normal(config.heads), normal(config.kv_heads), normal(config.kv_heads))


def _forms(length: int, config: AttentionBenchConfig) -> dict[str, Form]:
    device, dtype, scale = device_name(), DTYPES[config.dtype], config.head_dim**-0.5
    three, two = _inputs(1, 3 * length, config), _inputs(2, 2 * length, config)
    plan = _plan(length, config.block_size)
    two_streams = stream_tokens(torch.zeros(length, dtype=torch.long), config.block_size, (NOISY_1, CLEAN))
    dense_3l = DensePlan(dense_bias(plan.tokens, dtype, device))
    dense_2l = DensePlan(dense_bias(two_streams, dtype, device))
    forms = {
        STRUCTURED: Form(lambda: plan.attend(0, *three.tensors, scale, None), three),
        DENSE_3L: Form(lambda: dense_3l.attend(0, *three.tensors, scale, None), three, dense_3l.bias.nbytes),
        DENSE_2L: Form(lambda: dense_2l.attend(0, *two.tensors, scale, None), two, dense_2l.bias.nbytes),
    }
    return {**forms, FLEX: _flex_form(plan, three, scale)} if config.flex else forms


def _flex_form(plan: StreamPlan, inputs: Inputs, scale: float) -> Form:
    on_gpu = device_name() == "cuda"
    mask = create_block_mask(plan.mask_mod(None), None, None, plan.length, plan.length, device=device_name())
    given = [x if on_gpu else x.detach() for x in inputs.tensors]  # on CPU it refuses what needs gradients
    grouped = inputs.query.shape[1] != inputs.key.shape[1]
    held = [x for x in mask.as_tuple() if isinstance(x, Tensor)]
    return Form(
        lambda: compiled_flex(dynamic=False)(*given, block_mask=mask, scale=scale, enable_gqa=grouped),
        inputs,
        sum(x.nbytes for x in held),
        backward=on_gpu,
    )


def _plan(length: int, block_size: int) -> StreamPlan:
    """Three whole streams over one document of `length` tokens, laid out as training does."""
    ids = torch.zeros((1, length), dtype=torch.long)
    rows = RowBatch(ids, ids, ids, torch.arange(length)[None])
    objective = BlockDiffusion(block_size, mask_token_id=0, seed=0, last_layer=NO_LAYER, keep_all=True)
    batch = objective.corrupted(rows, torch.zeros_like(ids, dtype=torch.bool), [0])
    return to_device(batch, device_name()).plan


def _check_equal(length: int, forms: dict[str, Form], dtype: str) -> None:
    expected = forms[DENSE_3L].forward()
    for name in (STRUCTURED, FLEX):
        if name not in forms:
            continue
        difference = float((forms[name].forward() - expected).abs().max())
        if not difference <= TOLERANCE[dtype]:
            raise JobError(f"L {length}: the output of `{name}` differs from the dense mask's by {difference}.")


def _line(
    length: int, name: str, form: Form, forward: Times, trained: Times, config: AttentionBenchConfig
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "L": length,
        "form": name,
        "forward ms": 1000 * forward.median(name),
        "forward + backward ms": 1000 * trained.median(name) if form.backward else None,
        "mask MiB": form.mask_bytes / MIB,
    }
    if config.memory:
        line["peak MiB, forward"] = peak_bytes(form.forward, device_name()) / MIB
        line["peak MiB, both"] = peak_bytes(form.both, device_name()) / MIB if form.backward else None
    return line
