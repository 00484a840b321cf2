"""Lines of prompts to answers: one model and engine, in this process or as a Ray actor, for pipelines/generate.py.

An answer is the dictionary of generate's output (DESIGN "generate output"); a prompt that cannot run gives
`{"id", "error"}` and disturbs no other. Nothing here depends on order or on neighbours, so any number of workers
writes the same answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actors.engine.events import Event, Failed, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.protocol.calls import derived_seed, generation_request
from actors.protocol.card import model_card
from actors.protocol.responses import diffusion_figures
from model.backbone import DTYPES
from model.config import DecodeConfig
from model.decoding import GenerationResult
from model.errors import JobError, UserError
from model.loading import load_model

ROWS_AHEAD = 4  # prompts given to an engine for each row it runs, so that a free row never waits for its next prompt

Answer = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One line of the input. index: its 0-based line number; error: what is wrong with the line itself, if anything."""

    index: int
    id: str
    fields: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class AnswerSettings:
    """What decides an answer beside its prompt, and how wide the engine runs. dtype: a key of `DTYPES`."""

    model: str
    dtype: str
    device: str
    seed: int
    decode: DecodeConfig
    max_rows: int
    weights: str = "model"

    @property
    def prompts_at_once(self) -> int:
        return self.max_rows * ROWS_AHEAD


def answer_of(result: GenerationResult) -> Answer:
    """One line of generate's output. Where the prompt asks, `logprobs`: each token's, and [token id, logprob] pairs."""
    answer = {
        "id": result.id,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens},
        "diffusion": diffusion_figures(result),
    }
    if result.logprobs is not None:
        answer["logprobs"] = [
            {"logprob": token.logprob, "top": [list(t) for t in token.top]} for token in result.logprobs
        ]
    return answer


def error_of(prompt: Prompt, message: str) -> Answer:
    """The line of a prompt that could not run."""
    return {"id": prompt.id, "error": message}


class Answers:
    """A loaded model that answers prompts. Its engine runs when `answer_all` steps it, or in its own thread."""

    def __init__(self, settings: AnswerSettings) -> None:
        self._settings = settings
        backbone = load_model(
            settings.model, dtype=DTYPES[settings.dtype], device=settings.device, mode=settings.decode.mode
        )
        self._card = model_card(backbone)
        self.engine = Engine(backbone, EngineConfig(max_rows=settings.max_rows, weights=settings.weights))

    def submit(self, prompt: Prompt, done: Callable[[Answer], None]) -> None:
        """Ask; `done` is called once with the answer or the error, at once or from where the engine runs."""
        if prompt.error is not None:
            done(error_of(prompt, prompt.error))
            return
        try:
            request = generation_request(
                prompt.fields,
                card=self._card,
                default_decode=self._settings.decode,
                request_id=prompt.id,
                default_seed=derived_seed(self._settings.seed, prompt.id),
            )
            self.engine.submit(request, lambda event: _settle(event, prompt, done))
        except UserError as error:
            done(error_of(prompt, str(error)))

    def answer_all(self, prompts: Iterable[Prompt], done: Callable[[Answer], None]) -> None:
        """Answer every prompt in this thread; answers come as they are ready, not in order."""
        still_open = 0

        def close(answer: Answer) -> None:
            nonlocal still_open
            still_open -= 1
            done(answer)

        for prompt in prompts:
            still_open += 1
            self.submit(prompt, close)
            while still_open >= self._settings.prompts_at_once:
                self._step()
        while still_open:
            self._step()

    def _step(self) -> None:
        if not self.engine.step():
            raise JobError("The engine stopped with prompts unanswered: run the same command again to go on.")


def _settle(event: Event, prompt: Prompt, done: Callable[[Answer], None]) -> None:
    if isinstance(event, Finished):
        done(answer_of(event.result))
    elif isinstance(event, Failed):
        done(error_of(prompt, event.message))


class AnswerWorker:
    """`Answers` as an async Ray actor: many prompts at once, the engine in its own thread."""

    def __init__(self, settings: AnswerSettings, threads: int) -> None:
        torch.set_num_threads(threads)
        self._answers = Answers(settings)
        self._answers.engine.start()

    async def ready(self) -> None:
        """Returns when the model is loaded."""

    async def answer(self, prompt: Prompt) -> Answer:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()

        def done(given: Answer) -> None:  # on the engine's thread
            loop.call_soon_threadsafe(answer.set_result, given)

        self._answers.submit(prompt, done)
        return await answer
