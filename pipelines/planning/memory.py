"""Memory of one worker by kind, for DeepSpeed ZeRO with AdamW and the training step of this project.

What stays (weights, sums of gradients, optimizer state, DeepSpeed's buckets) is counted by element. What comes and goes
peaks at one of two moments: in the backward pass of the last layers, when every layer's activations are there, or in
the optimizer's step, when they are gone and a float32 copy of the gradients is there. Activations are counted tensor by
tensor as autograd keeps them for a decoder layer with RMSNorm in float32, rotary attention and a gated MLP.

Letters: as in shape.py; T tokens of a forward, N predictions, b bytes of a number in forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.planning.setup import STATE_WIDTH, Setup
from pipelines.planning.shape import Shape

CUDA_CONTEXT = 1.6e9  # CUDA context, cuBLAS workspaces and NCCL's channels: assumed, not measured here
CUDA_SLACK = 0.05  # of the rest, lost between blocks of the caching allocator: assumed
SUB_GROUP = 1_000_000_000  # elements that DeepSpeed updates at once


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker on its device, by kind. `host`: in the machine's memory, where something is offloaded.

    The transient kinds are not there together: a peak has `activations` with the larger of `loss` and `layer`, or
    `update` alone.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    buckets: float
    activations: float
    loss: float
    layer: float
    update: float
    runtime: float
    slack: float
    host: float

    @property
    def resident(self) -> float:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer + self.buckets + self.runtime

    @property
    def peak(self) -> float:
        """The most that is in use at once."""
        backward = self.gathered + self.activations + max(self.loss, self.layer)
        return (self.resident + max(backward, self.update)) * (1 + self.slack)

    @property
    def kinds(self) -> dict[str, float]:
        """Name to bytes, in the order that tables show."""
        return {
            "weights": self.weights,
            "gradients (float32 sums)": self.gradients,
            "optimizer (master copy, two moments)": self.optimizer,
            "gathered parameters": self.gathered,
            "buckets of the reduction": self.buckets,
            "activations": self.activations,
            "loss (logits in chunks, head's gradient)": self.loss,
            "one layer's backward": self.layer,
            "optimizer step (copy of the gradients)": self.update,
            "CUDA context and libraries": self.runtime,
        }


def memory_of(shape: Shape, setup: Setup) -> Memory:
    """The memory of each worker."""
    shares = setup.workers if setup.zero_stage >= 1 else 1
    trained = shape.parameters * setup.trainable
    on_device = 0.0 if setup.offload_optimizer != "none" else 1.0
    state = 3 * STATE_WIDTH * trained / shares
    sums = _gradients(setup, trained)
    copied = STATE_WIDTH * min(trained / shares, SUB_GROUP)
    weights = _weights(shape, setup)
    moved = weights if setup.offload_parameters != "none" else 0.0
    return Memory(
        weights=weights - moved + _frozen(shape, setup),
        gradients=sums * on_device,
        optimizer=state * on_device,
        gathered=_gathered(shape, setup),
        buckets=_buckets(setup, trained),
        activations=_activations(shape, setup),
        loss=_loss(shape, setup),
        layer=_layer_backward(shape, setup),
        update=copied * on_device,
        runtime=CUDA_CONTEXT if setup.cuda else 0.0,
        slack=CUDA_SLACK if setup.cuda else 0.0,
        host=_hosted(setup.offload_optimizer, state + sums) + _hosted(setup.offload_parameters, weights),
    )


def _hosted(place: str, size: float) -> float:
    """What of an offloaded share lies in the machine's memory; on a disk it costs none."""
    return size if place == "cpu" else 0.0


def _weights(shape: Shape, setup: Setup) -> float:
    return setup.width * shape.parameters / (setup.workers if setup.zero_stage == 3 else 1)


def _frozen(shape: Shape, setup: Setup) -> float:
    """A second network that does not learn."""
    if not setup.frozen_streams:
        return 0.0
    return setup.width * shape.parameters / (setup.workers if setup.frozen_shared else 1)


def _gradients(setup: Setup, trained: float) -> float:
    """Sums over micro-steps: a worker's share from stage 2 on, else of every parameter; stage 0 keeps the format."""
    width = STATE_WIDTH if setup.zero_stage else setup.width
    return width * trained / (setup.workers if setup.zero_stage >= 2 else 1)


def _gathered(shape: Shape, setup: Setup) -> float:
    """DeepSpeed keeps a gathered parameter that comes again soon: a model below the bound is whole in every worker."""
    networks = int(setup.shared) + int(setup.frozen_shared and setup.workers > 1)
    return networks * setup.width * float(min(shape.parameters, max(setup.live_parameters, shape.largest)))


def _buckets(setup: Setup, trained: float) -> float:
    """The bucket that gradients gather in, and the copy of it that is reduced."""
    filled = min(setup.reduce_bucket, trained)
    if setup.workers == 1:
        return setup.width * filled
    return 2.0 * setup.width * filled


def layer_bytes(shape: Shape, setup: Setup) -> float:
    """What one decoder layer keeps for its backward pass, per token.

    Each norm: its input in float32 (4H), the normalised copy and the result (2bH). Attention: query and output (2bA; on
    CUDA a copy of the output for its projection, 1bA: assumed), keys and values (2bKV), log-sum-exps. MLP: gate, its
    activation, up, their product (4bF).
    """
    b = setup.width
    norms = 2 * (4 + 2 * b) * shape.hidden
    queries = (3 if setup.cuda else 2) * b * shape.attention
    attention = queries + 2 * b * shape.kv + 4 * shape.heads
    return norms + attention + 4 * b * shape.mlp


def _activations(shape: Shape, setup: Setup) -> float:
    """All layers', or with checkpointing their inputs and one layer in full; the final norm's besides, and what a
    frozen network's keys and values take."""
    tokens, one = setup.micro_tokens, layer_bytes(shape, setup)
    last = tokens * (4 + 2 * setup.width) * shape.hidden
    last += setup.micro_rows * setup.row_tokens * setup.frozen_streams * shape.layers * 2 * setup.width * shape.kv
    if setup.checkpointing:
        return tokens * (shape.layers * setup.width * shape.hidden + one) + last
    return tokens * shape.layers * one + last


def _layer_backward(shape: Shape, setup: Setup) -> float:
    """Gradients that live together inside one layer, and that of its largest matrix before it is reduced."""
    b = setup.width
    mlp = 3 * b * shape.mlp + 2 * b * shape.hidden
    attention = 6 * b * shape.attention + 2 * b * shape.hidden
    norm = (12 + 2 * b) * shape.hidden
    return setup.micro_tokens * max(mlp, attention, norm) + b * shape.hidden * shape.mlp


def _loss(shape: Shape, setup: Setup) -> float:
    """Logits of a chunk of predictions in two formats and, until they are reduced, the head's gradients.

    Two towers hold all logits at once, and their gradients.
    """
    b, predictions = setup.width, setup.micro_predictions
    whole = STATE_WIDTH * predictions * shape.vocabulary
    if setup.frozen_streams:
        return 2 * whole * (1 + b / STATE_WIDTH) + b * shape.head
    chunk = min(whole, setup.loss_chunk)
    sums = b if whole <= setup.loss_chunk or b == STATE_WIDTH else STATE_WIDTH + b
    return chunk * (1 + b / STATE_WIDTH) + sums * shape.head + 2 * b * predictions * shape.hidden
