"""Answers and seconds: contenders take turns on the same questions, so that a drifting machine is fair to all.

The questions are cut into rounds. In a round every contender answers the same questions, the order turning by one from
round to round; a contender's seconds are those of its own turns. Before its first turn it answers one question that is
not counted (warm-up). All models are in memory at once, each with one engine for all its contenders. Seconds hold
prefill, decoding and sampling; not tokenization of the prompts, nor anything behind a stop token, which is never run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.answers import answer_of
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from actors.protocol.card import ModelCard, model_card
from model.backbone import DTYPES, Backbone
from model.decoding import GenerationRequest
from model.loading import load_model
from pipelines.assessment.contenders import AR, Contender, Subject
from pipelines.assessment.journal import Journal, Key
from pipelines.assessment.questions import Question, make_requests
from pipelines.jobkit import Progress

TURN_ROWS = (
    4  # a turn asks this many questions for each row of the engine, so that its end, with rows idle, weighs little
)
LEAST_TURN = 8
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Settings:
    """What all contenders share. max_rows: requests decoded together; dtype: a key of DTYPES."""

    dtype: str
    device: str
    max_rows: int
    seed: int
    weights: str = "model"

    @property
    def turn(self) -> int:
        """Questions in a round."""
        return max(LEAST_TURN, TURN_ROWS * self.max_rows)


def split_rounds(questions: Sequence[Question], settings: Settings) -> list[Sequence[Question]]:
    """The questions of each round."""
    return [questions[i : i + settings.turn] for i in range(0, len(questions), settings.turn)]


def measure(
    contenders: Sequence[Contender], questions: Sequence[Question], settings: Settings, journal: Journal
) -> None:
    """Let every contender answer every question; what the journal holds already is not measured again.

    Entries ("round", label, number): {"seconds", "answers": [...]}, the answers as generate writes them, with `kind`
    and `correct`. Raises UserError for a question that a contender cannot be asked.
    """
    rounds = split_rounds(questions, settings)
    keys: list[Key] = [("round", c.label, number) for number in range(len(rounds)) for c in contenders]
    left = sum(key not in journal for key in keys)
    if not left:
        return
    players = make_players(contenders, questions, settings)
    with Progress("assess", total=len(keys), unit="turns", already=len(keys) - left) as progress:
        for number, asked in enumerate(rounds):
            for contender in _order(contenders, number):
                key = ("round", contender.label, number)
                if key not in journal:
                    journal.put(key, players[contender.label].turn(asked))
                    progress.advance(contender=contender.label)


def make_players(
    contenders: Sequence[Contender], questions: Sequence[Question], settings: Settings
) -> dict[str, Player]:
    """The contenders by label, with their models loaded, each once. Raises UserError for what cannot be asked."""
    engines = {subject: _load(subject, questions, settings) for subject in dict.fromkeys(c.subject for c in contenders)}
    return {c.label: _player(c, *engines[c.subject], questions, settings) for c in contenders}


def _order(contenders: Sequence[Contender], number: int) -> list[Contender]:
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


@dataclass
class Player:
    """A contender at work: the engine of its model, and its requests by question id."""

    engine: Engine
    requests: dict[str, GenerationRequest]
    warm: bool = False

    def turn(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Answer the questions together."""
        requests = [self.requests[question.id] for question in questions]
        if not self.warm:
            self._warm_up(requests[0])
        started = time.perf_counter()
        results = generate_all(self.engine, requests)
        seconds = time.perf_counter() - started
        answers = [
            {**answer_of(result), "kind": question.kind, "correct": question.judge(result.text)}
            for question, result in zip(questions, results, strict=True)
        ]
        return {"seconds": seconds, "answers": answers}

    def _warm_up(self, request: GenerationRequest) -> None:
        short = replace(request, id="warm-up", max_tokens=min(request.max_tokens, WARM_UP_TOKENS))
        generate_all(self.engine, [short])
        self.warm = True


def _player(
    contender: Contender, card: ModelCard, engine: Engine, questions: Sequence[Question], settings: Settings
) -> Player:
    requests = make_requests(questions, card, contender.decode, settings.seed)
    for request in requests:
        engine.decoder.check(request)
    return Player(engine, {request.id: request for request in requests})


def _load(subject: Subject, questions: Sequence[Question], settings: Settings) -> tuple[ModelCard, Engine]:
    """The model with an engine whose rows are as long as the longest question and answer."""
    backbone = load_model(subject.source, dtype=DTYPES[settings.dtype], device=settings.device, mode="ar")
    card = model_card(backbone, name=subject.name)
    longest = max(len(r.prompt_ids) + r.max_tokens for r in make_requests(questions, card, AR, settings.seed))
    config = EngineConfig(
        settings.max_rows,
        _row_length(longest, backbone),
        weights=settings.weights,
        prefix_cache=False,  # contenders are asked the same: none may find what another has encoded
    )
    return card, Engine(backbone, config)


def _row_length(longest: int, backbone: Backbone) -> int:
    """`longest` in whole blocks, as far as the context reaches."""
    block = backbone.block_diffusion.block_size if backbone.block_diffusion else 1
    return min(-(-longest // block) * block, backbone.context_length)
