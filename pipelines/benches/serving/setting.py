"""What the benches of serving have in common: the application's arguments, the questions, a running service."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from model.errors import UserError
from pipelines.assessment.questions import task_questions
from pipelines.benches.result import BenchConfig, model_of
from pipelines.benches.serving.questions import Question

NAME = "served"  # what clients send as `model`
CHAT = "/v1/chat/completions"


class ServingBenchConfig(BenchConfig):
    """Keys of every bench of serving."""

    rows: int = Field(8, ge=1, description="requests that a replica decodes together")
    threads: int = Field(1, ge=1, description="cores of a replica; HTTP, Ray and the clients need others")
    tasks: int = Field(32, ge=1, description="different questions, held-out tasks")
    max_tokens: int = Field(64, ge=1, description="longest answer in tokens")


def source_of(config: ServingBenchConfig) -> tuple[str, str]:
    """(source, name for the table) of the model."""
    return model_of(config)


def serve_args(config: ServingBenchConfig, source: str, *, replicas: int = 1) -> dict[str, Any]:
    """ServeArgs' fields. In float32: the same request has the same answer, whatever runs beside it."""
    return {
        "model": source,
        "served_name": NAME,
        "min_replicas": replicas,
        "max_replicas": replicas,
        "cpus_per_replica": config.threads,
        "gpus_per_replica": 1 if torch.cuda.is_available() else 0,
        "dtype": "float32",
        "engine": {"max_rows": config.rows},
        "drain_s": 5,
    }


def make_questions(config: ServingBenchConfig) -> list[Question]:
    """Held-out tasks as chats, greedy; their answers are still to be learned."""
    asked = task_questions(config.tasks, config.seed, config.max_tokens)
    return [Question(CHAT, {"model": NAME, **question.fields}) for question in asked]


def check_threads(config: ServingBenchConfig, replicas: int, cores: int) -> None:
    """Raises UserError where the replicas would leave no core, or have not even enough."""
    if config.threads * replicas > cores:
        raise UserError(f"--threads {config.threads} with {replicas} replicas: this machine has {cores} cores.")
