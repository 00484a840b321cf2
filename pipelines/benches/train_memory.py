"""Peak memory of a training step, each form in a process of its own, where nothing is left that it could reuse."""

from __future__ import annotations

import gc
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from model.errors import JobError
from pipelines.benches.memory import give_back_freed_memory, peak_bytes, process_peak_bytes
from pipelines.benches.result import device_name
from pipelines.benches.train_step import Shape, backward, forward, load_model, make_case, shortened


@dataclass(frozen=True)
class Peak:
    """Bytes. step: what the step needs beyond the loaded model, gradients included; process: of the whole process."""

    step: int
    process: int


def peak_of(source: str, shape: Shape, form: str, threads: int) -> Peak:
    """Load the model in a new process with `threads` torch threads and run one step of one form there.

    Raises JobError where that process is killed, which is what the system does when memory runs out.
    """
    gc.collect()
    give_back_freed_memory()  # the new process needs it
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, source, shape, form, threads).result()
        except BrokenExecutor as error:
            raise JobError(
                f"The process that measured the memory of {form!r} ({shape.rows} x {shape.length}) was killed, most "
                "likely for want of memory: give fewer --layers or --rows, or leave it out with --memory false."
            ) from error


def _measure(source: str, shape: Shape, form: str, threads: int) -> Peak:
    torch.set_num_threads(threads)
    case = make_case(shape, load_model(source, shape.layers, shape.block_size, shape.dtype))
    forward(shortened(case), form)[0].backward()  # what is allocated once and kept is no part of the step
    case.backbone.model.zero_grad(set_to_none=True)
    step = peak_bytes(lambda: backward(case, form), device_name())
    return Peak(step, torch.cuda.max_memory_allocated() if device_name() == "cuda" else process_peak_bytes())
