"""The most likely token and the log-sum-exp of each row of logits, in C++ where that can be had."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from model.kernels.build import load_kernels


def peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(argmax int64 [N], logsumexp [N]) of logits [N, V]. A row with NaN or +inf gets a normaliser that is not finite.

    Ties go to the first index. A row's result does not depend on the others.
    """
    on_cpu = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    library = load_kernels() if on_cpu and len(logits) else None
    if library is None:
        return logits.argmax(-1), logits.logsumexp(-1)
    rows, width = logits.shape
    token, normaliser = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    library.blockcast_peaks(
        c_void_p(logits.data_ptr()),
        c_int64(rows),
        c_int64(width),
        c_void_p(token.data_ptr()),
        c_void_p(normaliser.data_ptr()),
        torch.get_num_threads(),
    )
    return token, normaliser
