"""Prompts in, answers out: `python pipelines/generate.py --model M --prompts P.jsonl --output A.jsonl`.

A prompt is a JSON object with `messages`, `prompt` or `prompt_token_ids` and the sampling fields of an HTTP request; an
answer carries text, token ids, usage and decoding figures. Answers stand in input order. A prompt that cannot run gives
a line with `error`, the others go on, and the job ends with exit code 1. Run again, it continues what it began.
`--ray.workers N` spreads the prompts over N Ray actors; the answers are the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field

from actors.answers import Answer, Answers, AnswerSettings, AnswerWorker, Prompt
from actors.protocol.calls import check_default
from model.chat_template import ensure_chat_template
from model.errors import JobError, UserError
from model.loading import describe_model, model_revision
from model.sources import fetch_model
from pipelines.jobkit import (
    NOT_IDENTITY,
    ClusterConfig,
    DecodeSection,
    EngineSection,
    JobConfig,
    OutputFile,
    Progress,
    Section,
    connect_ray,
    main,
)
from pipelines.jobkit.identity import hash_file
from pipelines.prompt_files import Journal, prompt_ids, read_prompts

WORKER_RESTARTS = 3


class RayConfig(Section):
    """Where the answers are made."""

    workers: int = Field(
        0, ge=0, description="Ray actors with one engine each; 0 means this process", json_schema_extra=NOT_IDENTITY
    )
    cpus_per_worker: int = Field(1, ge=1, description="CPU cores of a worker", json_schema_extra=NOT_IDENTITY)
    gpus_per_worker: float = Field(
        0, ge=0, description="GPUs of a worker; 0 runs on the CPU", json_schema_extra=NOT_IDENTITY
    )


class GenerateConfig(JobConfig):
    """Answer the prompts of a JSONL file with a model, with usage and decoding figures for each."""

    output_name: ClassVar[str] = "generate/answers.jsonl"

    # Which prompts they are is told by the file's hash, an input of the output.
    prompts: str | None = Field(
        None, description="JSONL file of prompts, plain or .gz: a path or an fsspec URI", json_schema_extra=NOT_IDENTITY
    )
    decode: DecodeSection = DecodeSection()
    engine: EngineSection = EngineSection()
    ray: RayConfig = RayConfig()
    cluster: ClusterConfig = ClusterConfig()


def run(config: GenerateConfig) -> dict[str, Any]:
    """Answer all prompts; returns the figures. Raises JobError at the end when some could not run."""
    prompts, ids = _prompts_of(config)
    settings, revision = _settings(config)
    inputs = {"the file of --prompts": hash_file(prompts), "--model": revision}
    with OutputFile(str(config.output), job="generate", config=config, inputs=inputs) as output:
        if output.finished is None:
            figures = _answer_or_forget(config, settings, output, prompts, ids)
            output.finish(figures)
            print(f"generate: {config.output}: {figures['answers']} answers", flush=True)
        else:
            figures = output.finished["figures"]
            print(f"generate: {config.output} is complete already", flush=True)
    if figures["errors"]:
        raise JobError(f"{figures['errors']} of {len(ids)} prompts could not run: see `error` in {config.output}.")
    return figures


def plan(config: GenerateConfig) -> dict[str, Any]:
    """What --dry-run prints."""
    _prompts_of(config)
    settings, _ = _settings(config)
    where = f"{config.ray.workers} Ray workers" if config.ray.workers else "this process"
    return {"where": where, "device": settings.device, "mode": settings.decode.mode, "rows": settings.max_rows}


def _prompts_of(config: GenerateConfig) -> tuple[str, list[str]]:
    if config.data:
        raise UserError("generate reads --prompts, not --data: give a JSONL file of prompts.")
    if config.prompts is None:
        raise UserError("--prompts is required: give a JSONL file with one prompt a line.")
    prompts = config.prompts if "://" in config.prompts else os.path.abspath(os.path.expanduser(config.prompts))
    return prompts, prompt_ids(prompts)


def _settings(config: GenerateConfig) -> tuple[AnswerSettings, str]:
    """What the workers need, and the model's revision; checks, without its weights, that it can decode as asked."""
    if config.model is None:
        raise UserError("--model is required: a model folder, a Hub id or an fsspec URI.")
    folder = fetch_model(config.model)
    model = describe_model(folder)
    model.check_mode(config.decode.mode)
    decode = config.decode.decode_config(adapted=model.adapted, two_tower=model.two_tower)
    decode = check_default(decode, model.block_diffusion)
    if model.tokenizer.eos_token and ensure_chat_template(model.tokenizer):
        print(f"generate: {config.model} has no chat template: chats go through the plain one.", file=sys.stderr)
    on_gpu = config.ray.gpus_per_worker > 0 if config.ray.workers else torch.cuda.is_available()
    settings = AnswerSettings(
        model=config.model,
        dtype=config.decode.dtype,
        device="cuda" if on_gpu else "cpu",
        seed=config.seed,
        decode=decode,
        max_rows=config.engine.max_rows,
        weights=config.engine.weights,
    )
    return settings, model_revision(folder)


def _answer_or_forget(
    config: GenerateConfig, settings: AnswerSettings, output: OutputFile, prompts: str, ids: list[str]
) -> dict[str, Any]:
    """Bad input found before the first answer leaves nothing to go on with: another model may follow."""
    try:
        return _answer(config, settings, output, prompts, ids)
    except UserError:
        output.forget_if_empty()
        raise


def _answer(
    config: GenerateConfig, settings: AnswerSettings, output: OutputFile, prompts: str, ids: list[str]
) -> dict[str, Any]:
    """Answer what the journal does not hold yet, and publish."""
    with Journal(output) as journal:
        kept = len(journal.done)
        if kept:
            print(f"generate: {kept} of {len(ids)} answers are there already", file=sys.stderr, flush=True)
        before = journal.total(journal.done)["completion_tokens"]
        started = time.monotonic()
        with Progress("generate", total=len(ids), unit="prompts", already=kept) as progress:

            def done(answer: Answer) -> None:
                journal.add(answer)
                progress.advance()

            missing = (prompt for prompt in read_prompts(prompts) if prompt.id not in journal.done)
            if kept < len(ids):
                answer_all = partial(_with_ray, config) if config.ray.workers else _in_process
                answer_all(settings, missing, done)
        seconds = time.monotonic() - started
        figures = _figures(journal, ids, before, seconds)
        journal.publish(ids)
    return figures


def _figures(journal: Journal, ids: list[str], tokens_before: int, seconds: float) -> dict[str, Any]:
    """The job's figures; tokens_per_second is this run's own."""
    total = journal.total(ids)
    errors = len(journal.errors)
    return {
        "prompts": len(ids),
        "answers": len(ids) - errors,
        "errors": errors,
        "prompt_tokens": total["prompt_tokens"],
        "completion_tokens": total["completion_tokens"],
        "tokens_per_forward": total["completion_tokens"] / max(1, total["denoise"] + total["commit"]),
        "tokens_per_second": (total["completion_tokens"] - tokens_before) / seconds,
    }


def _in_process(settings: AnswerSettings, prompts: Iterable[Prompt], done: Callable[[Answer], None]) -> None:
    Answers(settings).answer_all(prompts, done)


def _with_ray(
    config: GenerateConfig, settings: AnswerSettings, prompts: Iterable[Prompt], done: Callable[[Answer], None]
) -> None:
    connect_ray()
    workers = _start_workers(config, settings)
    try:
        _spread(workers, settings.prompts_at_once, iter(prompts), done)
    finally:
        _stop_workers(workers)


def _start_workers(config: GenerateConfig, settings: AnswerSettings) -> list[Any]:
    """Loaded workers. Raises JobError when the cluster does not give them within --cluster.wait_s."""
    import ray

    options: dict[str, Any] = {
        "num_cpus": config.ray.cpus_per_worker,
        "num_gpus": config.ray.gpus_per_worker,
        "max_concurrency": settings.prompts_at_once,
        "max_restarts": WORKER_RESTARTS,
        "max_task_retries": WORKER_RESTARTS,
    }
    actor: Any = ray.remote(AnswerWorker)
    actor = actor.options(**options)
    workers = [actor.remote(settings, config.ray.cpus_per_worker) for _ in range(config.ray.workers)]
    loading = [worker.ready.remote() for worker in workers]
    ready, _ = ray.wait(loading, num_returns=len(workers), timeout=config.cluster.wait_s)
    if len(ready) < len(workers):
        _stop_workers(workers)
        waited = f"after {config.cluster.wait_s:g} s the cluster gave {len(ready)} of {len(workers)} workers"
        raise JobError(f"{waited}: ask for fewer with --ray.workers, or wait longer with --cluster.wait_s.")
    ray.get(ready)
    return workers


def _stop_workers(workers: Iterable[Any]) -> None:
    import ray

    for worker in workers:
        ray.kill(worker)


def _spread(workers: list[Any], each: int, prompts: Iterator[Prompt], done: Callable[[Answer], None]) -> None:
    """Keep every worker supplied with `each` prompts; a worker that died is restarted by Ray and asked again."""
    import ray
    from ray.exceptions import RayActorError

    running: dict[Any, Any] = {}

    def ask(worker: Any) -> None:
        prompt = next(prompts, None)
        if prompt is not None:
            running[worker.answer.remote(prompt)] = worker

    for _ in range(each):
        for worker in workers:
            ask(worker)
    while running:
        finished, _ = ray.wait(list(running), num_returns=1)
        for reference in finished:
            try:
                done(ray.get(reference))
            except RayActorError as error:
                raise JobError(
                    f"A worker died more than {WORKER_RESTARTS} times: run the command again to go on."
                ) from error
            ask(running.pop(reference))


if __name__ == "__main__":
    sys.exit(main("generate", GenerateConfig, run, plan))
