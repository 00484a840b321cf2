"""The arithmetic of a step and how long a GPU needs for it.

Products with matrices cost 2 operations an element and token forward and twice that backward (once more forward with
activation checkpointing). Attention costs 4 operations for each pair of a query with a key it may see, per unit of
width, forward, and 2.5 times that backward. What is not a product (norms, rotary embedding, gates, residuals, casts) is
bound by the GPU's memory: bytes a token and layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.planning.hardware import GB, Gpu
from pipelines.planning.setup import STATE_WIDTH, Setup
from pipelines.planning.shape import Shape

TERA = 1e12
BACKWARD_ATTENTION = 2.5  # of the forward's operations, as FlashAttention recomputes scores
ATTENTION_SHARE = 0.5  # of the efficiency of plain products that masked attention reaches: assumed
NARROW_PASSES = 30  # reads and writes of a hidden-wide tensor that one layer makes beside products, forward: counted
WIDE_PASSES = 6  # the same for MLP-wide tensors
MEMORY_REACHED = 0.8  # of a GPU memory's rate that element-wise kernels get: assumed
UPDATE_BYTES = 4 * STATE_WIDTH + 3 * STATE_WIDTH + 2  # AdamW reads 4 numbers an element, writes 3 and the weight


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one step over all workers. model: operations without what checkpointing repeats."""

    products: float
    attention: float
    model: float
    narrow_bytes: float
    update_bytes: float

    @property
    def operations(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True)
class Rows:
    """What a row costs. pairs: query-key pairs that are computed; head: positions of it; frozen_*: of a second network
    that only runs forward."""

    tokens: float
    pairs: float
    head: float
    frozen_tokens: float = 0.0
    frozen_pairs: float = 0.0


def own_rows(setup: Setup, documents: float) -> Rows:
    """A row as this project lays it out. documents: in a row, all of one length; a query sees its own document only.

    Noisy queries see the clean blocks before them, clean ones the same: half of a document's length on average.
    """
    length = setup.row_tokens / max(documents, 1.0)
    return Rows(
        tokens=setup.row_tokens * setup.streams,
        pairs=setup.row_tokens * setup.streams * length / 2,
        head=setup.row_tokens * setup.predicted,
        frozen_tokens=setup.row_tokens * setup.frozen_streams,
        frozen_pairs=setup.row_tokens * setup.frozen_streams * length / 2,
    )


def published_rows(row_tokens: int) -> Rows:
    """A row as the published code runs it: twice [noisy | clean], the head on both noisy halves, no document mask.

    Its mask leaves 2 (L/2 L + L/2 L) pairs: noisy on earlier clean, clean on clean, in each of the two.
    """
    return Rows(tokens=4.0 * row_tokens, pairs=2.0 * row_tokens**2, head=2.0 * row_tokens)


def work_of(shape: Shape, rows: Rows, setup: Setup) -> Work:
    """The work of one step."""
    forwards = 2 if setup.checkpointing else 1
    count = setup.rows_per_step
    tokens = rows.tokens * count
    layers = 2 * tokens * shape.matrices
    head = 2 * rows.head * count * shape.head
    trained = 2 if setup.trainable == 1 else 1 + setup.trainable  # frozen weights get no gradient of their own
    a_pair = 4.0 * shape.attention * shape.layers
    a_token = shape.layers * setup.width * (NARROW_PASSES * shape.hidden + WIDE_PASSES * shape.mlp)
    pairs, frozen_pairs = a_pair * rows.pairs * count, a_pair * rows.frozen_pairs * count
    frozen = 2 * rows.frozen_tokens * count * shape.matrices
    return Work(
        products=layers * (forwards + trained) + head * (1 + trained) + frozen,
        attention=pairs * (forwards + BACKWARD_ATTENTION) + frozen_pairs,
        model=(layers + head) * (1 + trained) + pairs * (1 + BACKWARD_ATTENTION) + frozen + frozen_pairs,
        narrow_bytes=a_token * count * (rows.tokens * (forwards + 2) + rows.frozen_tokens),
        update_bytes=UPDATE_BYTES * shape.parameters * setup.trainable,
    )


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step on every worker, by what they go into."""

    products: float
    attention: float
    narrow: float
    update: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.narrow + self.update


def seconds_of(work: Work, setup: Setup, gpu: Gpu, efficiency: float) -> Seconds:
    """efficiency: share of the peak that matrix products reach. Rows that do not divide leave some workers waiting."""
    uneven = setup.micro_steps * setup.micro_rows * setup.workers / setup.rows_per_step
    peak = gpu.tflops * TERA * setup.workers / uneven
    memory = gpu.bandwidth_gbs * GB * MEMORY_REACHED
    return Seconds(
        products=work.products / (peak * efficiency),
        attention=work.attention / (peak * efficiency * ATTENTION_SHARE),
        narrow=work.narrow_bytes / (memory * setup.workers / uneven),
        update=work.update_bytes / (memory * setup.workers),
    )
