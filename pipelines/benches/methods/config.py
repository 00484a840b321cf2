"""The keys of `bench.py methods`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipelines.benches.result import BenchConfig


class MethodsBenchConfig(BenchConfig):
    """Compare block-writing methods with the AR control: accuracy, tokens/s, memory and the cost of training."""

    output_name: ClassVar[str] = "bench/methods.json"

    rounds: int = Field(1, ge=1, description="times that all tasks are asked; each is cut into turns of their own")
    control: str | None = Field(None, description="AR model that everything is compared with: id, folder or URI")
    base: str | None = Field(None, description="AR model that the others were adapted from, if it is not the control")
    fast_dllm_v2: str | None = Field(None, description="model adapted by block diffusion: id, folder or URI")
    two_tower: str | None = Field(None, description="TwoTower model whose denoiser is a full clone")
    two_tower_lora: str | None = Field(None, description="TwoTower model whose denoiser is a low-rank adapter")
    tasks: int = Field(124, ge=1, description="held-out tasks, the kinds taking turns")
    kinds: tuple[str, ...] = Field((), description="kinds of tasks, such as json_person; none: all of them")
    max_tokens: int = Field(96, ge=1, description="longest answer in tokens")
    max_rows: int = Field(1, ge=1, description="requests decoded together: 1 is one person waiting")
    thresholds: tuple[float, ...] = Field(
        (0.9,), description="confidences at which a Fast-dLLM v2 model reveals, a contender each"
    )
    gammas: tuple[float, ...] = Field((0.8,), description="the same of a TwoTower model's budgeted policy")
    steps: int | None = Field(None, ge=1, description="most denoising steps of a TwoTower block; null: one a token")
    lossless: bool = Field(True, description="also lossless mode")
    memory: bool = Field(True, description="also memory, each contender in a process of its own")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("bfloat16", description="number format")
    weights: Literal["model", "int8"] = Field("model", description="on a CPU: int8 decodes with quantised weights")
