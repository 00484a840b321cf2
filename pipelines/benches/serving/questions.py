"""Requests whose exact answers are known beforehand: asked once of a quiet server, each different from all others.

The engine gives the same tokens to the same request whether it runs alone or in a batch (greedy or with a seed, in
float32), so whatever differs from what was learned is a wrong answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from model.errors import JobError
from pipelines.benches.serving.client import Answer, Outcome, Record, Target, ask

AT_ONCE = 4


@dataclass(frozen=True)
class Question:
    """path: `/v1/...` of the request. fields: its JSON without `stream`. answer: None until it was learned."""

    path: str
    fields: Mapping[str, Any]
    answer: Answer | None = None


def learn(target: Target, questions: Sequence[Question], *, distinct: bool = True) -> list[Question]:
    """The questions with their answers. Raises JobError where one is not answered, or where two answers are the same
    though they must be `distinct`.
    """
    learned = asyncio.run(_learn(target, questions))
    if distinct and len({question.answer for question in learned}) < len(learned):
        raise JobError("Two questions have the same answer: a mix-up between them would not be seen.")
    return learned


async def _learn(target: Target, questions: Sequence[Question]) -> list[Question]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(session: aiohttp.ClientSession, question: Question) -> Question:
        async with gate:
            record = await ask(session, target, question.path, question.fields, None, Record(stream=False))
        if record.outcome is not Outcome.RIGHT or record.answer is None:
            raise JobError(f"The quiet server did not answer {dict(question.fields)}: {record.detail}")
        return replace(question, answer=record.answer)

    async with target.session() as session:
        return list(await asyncio.gather(*(one(session, question) for question in questions)))
