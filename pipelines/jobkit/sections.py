"""The typed configuration of jobs: the base classes and the sections that several jobs share.

A section is a frozen pydantic model; a field's description states its unit and meaning and is what `--help` shows, so a
field without one is refused when the class is made. A key that cannot change what a job computes (a waiting time, a
batch width) is marked with `NOT_IDENTITY`: changing it does not stop a job from continuing its output.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from model.config import FUSED_DEFAULT, DecodeConfig, check_sub_block
from pipelines.jobkit.keys import section_type

NOT_IDENTITY: dict[str, Any] = {"identity": False}
LARGEST = 2**63 - 1  # what counters, files and tensors hold


class Section(BaseModel):
    """A group of keys. Frozen; unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            if not field.description and section_type(field.annotation) is None:
                raise TypeError(f"{cls.__name__}.{name} needs a description: it is what --help shows")

    @model_validator(mode="after")
    def _numbers_are_countable(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}")
        return self


class JobConfig(Section):
    """The keys every job has. Subclasses add their own and may change a default."""

    output_name: ClassVar[str] = ""
    """Where the output lies under the storage root when --output is absent; empty means the job's name."""
    writes_by_default: ClassVar[bool] = True
    """Whether the job writes where no --output is given."""

    model: str | None = Field(None, description="model to start from: a Hub id, a folder or an fsspec URI")
    data: tuple[str, ...] = Field(
        (), description="inputs: files, folders, globs or fsspec URIs of JSONL or Parquet, or a Hub dataset id"
    )
    output: str | None = Field(
        None,
        description="where results go, a path or an fsspec URI; null: the job's name under BLOCKCAST_STORAGE, or ./out",
        json_schema_extra=NOT_IDENTITY,
    )
    seed: int = Field(0, ge=0, description="seed of every random draw of this job")

    @field_validator("model", "data", "output")
    @classmethod
    def _is_named(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """An empty word, as an unset variable of a shell leaves it, would mean the folder that the job starts in."""
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise ValueError("it must not be empty text")
        return value


class ReadConfig(Section):
    """How chats are read."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = Field(
        "auto", description="shape of the input lines; auto detects it once per file"
    )
    max_rejected: int | None = Field(
        None, ge=0, description="lines that may be rejected before the job ends with exit code 2; null means no limit"
    )
    over_long: Literal["split", "truncate", "reject"] = Field(
        "split", description="what happens to a document longer than a row: split at turns, cut at its end, or reject"
    )
    max_line_bytes: int = Field(
        16 << 20, ge=1, description="longest line in bytes that is read; a longer one is rejected without being held"
    )
    shard_bytes: int = Field(
        32 << 20,
        ge=1,
        description="bytes of a file that one task reads; the rows do not depend on it",
    )


class PackConfig(Section):
    """How documents become rows."""

    block_size: int = Field(32, ge=1, description="tokens in a block; every document is padded to a multiple of it")
    context_length: int = Field(2048, ge=1, description="tokens in a packed row; a multiple of block_size")

    @model_validator(mode="after")
    def _whole_blocks(self) -> PackConfig:
        if self.context_length % self.block_size:
            raise ValueError(
                f"context_length {self.context_length} is not a multiple of block_size {self.block_size}; "
                f"the nearest below is {self.context_length // self.block_size * self.block_size}"
            )
        return self


class DecodeSection(Section):
    """How answers are decoded when a request does not say."""

    policy: str | None = Field(
        None,
        description="rule that reveals tokens: threshold, sequential, static, factor, frechet, entropy, dimple, "
        "prophet or budgeted; null means threshold, or budgeted for a TwoTower model",
    )
    threshold: float | None = Field(
        None,
        gt=0,
        le=1,
        description="confidence (probability) above which the threshold policy reveals a token; 1 reveals one a step; "
        "null means 0.9",
    )
    steps: int | None = Field(
        None,
        ge=1,
        description="denoising steps per block of the policies static, dimple, prophet and budgeted; null means one "
        "per token",
    )
    factor: float | None = Field(
        None, gt=0, description="bound of the factor policy, higher reveals more; null means 1"
    )
    gamma: float | None = Field(
        None,
        ge=0,
        description="confidence bound of dimple and budgeted (null means 0.95 and 0.8), or the entropy in nats that "
        "the entropy policy spends a step (null means 0.1)",
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="probability that the frechet policy risks a step, the sum of (1 - confidence); null means 0.5",
    )
    refresh: str = Field(
        "always",
        description="when the whole block runs: always (exact); sub_block: once a sub-block, faster and approximate; "
        "every:N: also after N - 1 steps of the sub-block alone",
    )
    fused: str = Field(
        FUSED_DEFAULT,
        description="whether a block's commit and the next block's first step share a forward: off; speculative (the "
        "same answers); masked_head (fewest forwards, answers of its own)",
    )
    sub_block_size: int | None = Field(
        None, ge=1, description="tokens denoised together, a divisor of the block; null means the checkpoint's"
    )
    mode: Literal["diffusion", "ar", "lossless", "auto"] | None = Field(
        None,
        description="diffusion (blocks), ar (token by token), lossless (the answer of ar, drafted as blocks and "
        "verified), or auto (by load, whichever of the first two answers sooner: answers may differ from run to run); "
        "null means diffusion where the model was adapted",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="number format of the forward pass")

    def check_against(self, block_size: int) -> None:
        """Raises UserError when sub_block_size does not divide the checkpoint's block."""
        if self.sub_block_size is not None:
            check_sub_block(self.sub_block_size, block_size)

    def decode_config(self, *, adapted: bool, two_tower: bool = False) -> DecodeConfig:
        """The decoder's view; the model decides what no mode and no policy mean."""
        return DecodeConfig.in_section(adapted=adapted, two_tower=two_tower, **self.model_dump(exclude={"dtype"}))


class EngineSection(Section):
    """How wide the engine runs."""

    max_rows: int = Field(
        8, ge=1, description="requests decoded together in one forward", json_schema_extra=NOT_IDENTITY
    )
    weights: Literal["model", "int8"] = Field(
        "model",
        description="on a CPU: model decodes in decode.dtype; int8 with quantised weights, faster and slightly inexact",
    )


class ClusterConfig(Section):
    """How a job meets its cluster."""

    wait_s: float = Field(
        600.0,
        ge=0,
        description="seconds to wait for the requested resources to join before giving up with exit code 1",
        json_schema_extra=NOT_IDENTITY,
    )
