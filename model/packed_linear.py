"""Linear layers for decoding on CPU, their weights packed once in oneDNN's own layout.

Why: a decoding forward has few tokens, where the plain product is slow and rounds a token's result differently with
the number of tokens beside it. Measured for SmolLM2's layers, float32, one thread (AMD EPYC, AVX-512), milliseconds a
product, plain / packed:
    576 x 1536:   1 token 0.34 / 0.31   4 tokens 0.42 / 0.24   32 tokens 0.97 / 0.69
    576 x 49152:  1 token 10.4 / 9.7    4 tokens 22.8 / 7.8    32 tokens 39.1 / 20.0
and a packed product of 2 tokens or more gave bit for bit the same row whatever the number of rows (1 to 600, with 1, 2
and 4 threads, float32 and bfloat16), which the plain one does not. Price: a second copy of the weights in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PACKABLE = (torch.float32, torch.bfloat16)
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class PackedLinear(nn.Linear):
    """A linear layer with the given one's parameters and hooks, that multiplies with a packed copy when no gradient is
    due.

    The copy is made again when the weight has changed; parameter names and state_dict stay as they were.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.train(linear.training)
        for name in HOOKS:
            setattr(self, name, getattr(linear, name))
        self._packed: tuple[tuple[int, int], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() == 0:
            return super().forward(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._pack(), self.bias, "none", [], "")
        return out

    def _pack(self) -> Tensor:
        current = (self.weight._version, self.weight.data_ptr())
        if self._packed is None or self._packed[0] != current:
            self._packed = (current, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None))
        return self._packed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # the packed layout can be neither copied nor pickled


def can_pack(model: nn.Module) -> bool:
    """Whether this machine's oneDNN runs the model's dtype: CPU, float32 or bfloat16."""
    first = next(model.parameters())
    if first.device.type != "cpu" or first.dtype not in PACKABLE or not torch.backends.mkldnn.is_available():
        return False
    return first.dtype != torch.bfloat16 or cpu_multiplies_bfloat16()


def cpu_multiplies_bfloat16() -> bool:
    """Whether oneDNN has products of bfloat16 for this CPU (AVX-512, AVX-NE-CONVERT, Arm's BF16). Without them PyTorch
    computes them element by element: measured on a CPU with AVX2 only, 1.3 GFLOP/s where float32 reaches 94."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> None:
    """Replace every plain linear layer of the model by a packed one, in place; parameters stay the same objects."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
