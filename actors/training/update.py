"""The end of a step: one update of the weights, or none, the same on every rank.

DeepSpeed's optimizers (ZeRO 1 to 3, and its float32 copies for bfloat16) leave a step out when the norm of its gradient
is no finite number. Without ZeRO in float32 nothing wraps the optimizer, so it is done here.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def finish_step(engine: Any) -> float | None:
    """After the last backward pass of a step: the gradient's norm before clipping, None where there was no update.

    Every rank calls it; the gradients are gone afterwards.
    """
    if engine.zero_optimization_stage() == 0:
        return _finish_whole(engine)
    engine.step()
    return float(engine.get_global_grad_norm()) if engine.was_step_applied() else None


def _finish_whole(engine: Any) -> float | None:
    """Every rank holds all gradients, reduced already."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm = float(torch.linalg.vector_norm(torch.stack(norms)))
    if math.isfinite(norm):
        engine.step()
        return norm
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    for parameter in engine.module.parameters():
        parameter.grad = None
    return None
