"""Peak memory of a call: what it needs at most, beyond what was in use before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from model.errors import JobError

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): resets the peak resident set size of the process


def peak_bytes(form: Callable[[], object], device: str) -> int:
    """Bytes. On CPU the growth of the process's peak resident memory, as Linux counts it; on CUDA the allocator's.

    Raises JobError where the system does not let a process reset its peak.
    """
    gc.collect()
    give_back_freed_memory()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        form()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        RESET.write_text(RESET_PEAK)
    except OSError as error:
        raise JobError(f"Peak memory cannot be measured here ({error}): leave it out with --memory false.") from error
    before = _status_bytes("VmRSS")
    form()
    return max(0, _status_bytes("VmHWM") - before)


def process_peak_bytes() -> int:
    """Peak resident memory of the process since `peak_bytes` last began to count (or since its start)."""
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """Resident memory of the process now, without what the allocator merely keeps."""
    give_back_freed_memory()
    return _status_bytes("VmRSS")


def give_back_freed_memory() -> None:
    """Let glibc return what it holds of freed memory: a call that could reuse it would seem to need less."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise JobError(f"Peak memory cannot be measured here (no {name} in {STATUS}): leave it out with --memory false.")
