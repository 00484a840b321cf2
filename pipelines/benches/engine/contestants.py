"""Who answers, and how their answers are compared: tokens/s, exact match, how many answers equal AR's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.engine.loop import Engine
from actors.engine.together import generate_all
from model.backbone import Backbone
from model.decoding import GenerationRequest, GenerationResult
from pipelines.assessment.questions import Question
from pipelines.benches.engine.setting import Setting
from pipelines.benches.timing import Times, take_turns

AR_NAME = "AR"
Answers = Sequence[tuple[int, ...]]


class Contestant(Protocol):
    """Answers the same questions each time it runs; `answers`, token ids with the stop token, are those of the last."""

    answers: Answers

    def run(self) -> None: ...


@dataclass
class EngineContestant:
    """Requests through an engine, as many at a time as it has rows."""

    engine: Engine
    requests: Sequence[GenerationRequest]
    answers: Answers = ()
    results: Sequence[GenerationResult] = field(default=())

    def run(self) -> None:
        self.results = generate_all(self.engine, self.requests)
        self.answers = [result.token_ids for result in self.results]

    @property
    def tokens_per_forward(self) -> float:
        forwards = sum(result.forwards["denoise"] + result.forwards["commit"] for result in self.results)
        return tokens_of(self.answers) / max(1, forwards)


def tokens_of(answers: Answers) -> int:
    return sum(map(len, answers))


def compete(title: str, contestants: Mapping[str, Contestant], setting: Setting) -> Times:
    """Seconds of all, in turns."""
    forms = {name: contestant.run for name, contestant in contestants.items()}
    return take_turns(forms, setting.config.rounds, title=f"engine: {title}")


def over(fast: str, slow: str, contestants: Mapping[str, Contestant], times: Times) -> float:
    """Tokens/s of one over the other's: their answers may differ in length."""
    return times.ratio(slow, fast) * tokens_of(contestants[fast].answers) / tokens_of(contestants[slow].answers)


def line(part: str, batch: int, name: str, contestants: Mapping[str, Contestant], times: Times) -> dict[str, Any]:
    """What a table shows of a contestant: sums over one run, medians over the rounds."""
    contestant = contestants[name]
    tokens, seconds = tokens_of(contestant.answers), times.median(name)
    return {
        "part": part,
        "batch": batch,
        "decoder": name,
        "tokens": tokens,
        "tokens/s": tokens / seconds,
        "per forward": contestant.tokens_per_forward if isinstance(contestant, EngineContestant) else None,
        "over AR": over(name, AR_NAME, contestants, times) if AR_NAME in contestants else None,
    }


def exact_match(answers: Answers, questions: Sequence[Question], backbone: Backbone) -> float:
    """Share of answers that are right, 0 to 1."""
    texts = [backbone.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in answers]
    right = [bool(question.judge(text)) for question, text in zip(questions, texts, strict=True)]
    return sum(right) / len(right)


def share_equal(answers: Answers, others: Answers) -> float:
    """Share of answers that are the same, token for token."""
    return sum(tuple(a) == tuple(b) for a, b in zip(answers, others, strict=True)) / len(others)
