"""Does a written folder say what the weights said? Asked of a fresh process that knows nothing of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.errors import JobError
from pipelines.exporting import fresh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOKENS = 64
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # of the largest logit; on one machine the difference is mostly 0


@dataclass(frozen=True)
class Proof:
    """What the fresh process found. loaded_as: transformers' class; difference and largest: of logits, absolute."""

    loaded_as: str
    tokens: int
    difference: float
    largest: float

    @property
    def text(self) -> str:
        """`loaded in a fresh process as Qwen2ForCausalLM, logits of 64 tokens equal`."""
        how = "equal" if self.difference == 0 else f"within {self.difference:.2g} of up to {self.largest:.3g}"
        return f"loaded in a fresh process as {self.loaded_as}, logits of {self.tokens} tokens {how}"


def probe_of(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Random token ids [1, T] and the causal logits [1, T, V] that the model in memory gives for them."""
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = min(PROBE_TOKENS, int(getattr(model.config.get_text_config(), "max_position_embeddings", PROBE_TOKENS)))
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(implementation)
    return {"ids": ids, "logits": logits.contiguous()}


def prove(folder: Path, probe: dict[str, Tensor], scratch: Path, kind: str = "auto") -> Proof:
    """Load `folder` in a fresh process and compare. kind: the class to load with, for a folder of remote code.

    Raises JobError where it does not load whole, or its logits differ by more than rounding.
    """
    question = scratch / "probe.safetensors"
    save_file(probe, question)
    try:
        found = _ask(folder, question, kind)
    finally:
        question.unlink()
    largest = float(probe["logits"].abs().max())
    _check(found, largest)
    return Proof(found["class"], probe["ids"].shape[1], found["largest_difference"], largest)


def _ask(folder: Path, question: Path, kind: str) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-I", str(fresh.__file__), str(folder), str(question), kind]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise JobError(f"The exported folder does not load in a fresh process: {reason}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _check(found: dict[str, Any], largest: float) -> None:
    if found["wrong"] or not found["same_shape"]:
        what = ", ".join(found["wrong"]) or "logits of another shape"
        raise JobError(f"The exported folder does not load whole in a fresh process ({what}).")
    difference = found["largest_difference"]
    if not found["finite"] or not difference <= TOLERANCE[found["dtype"]] * largest:
        raise JobError(
            f"The exported folder gives other logits in a fresh process: they differ by {difference:.3g} where the "
            f"largest is {largest:.3g}."
        )
