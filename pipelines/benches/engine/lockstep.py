"""The engine against lock-step batches: same requests, ragged prompts and answers, same answers.

Two rivals: the published way as a whole (`lockstep_decoder`), and its order of forwards alone, through our decoder
(`lockstep_rows`), which shows what waiting costs when everything else is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from model.decoding import GenerationRequest
from model.errors import JobError
from pipelines.benches.engine.contestants import (
    Answers,
    Contestant,
    EngineContestant,
    compete,
    line,
    over,
    share_equal,
)
from pipelines.benches.engine.lockstep_decoder import LockstepDecoder
from pipelines.benches.engine.lockstep_rows import LockstepRows
from pipelines.benches.engine.setting import PartResult, Setting

LOCKSTEP, LOCKSTEP_ROWS = "lock-step batches", "lock-step batches, our forward"
ENGINE = {"off": "engine", "speculative": "engine, fused speculative"}
CLOSE = 1e-4  # of confidence: decisions closer than this may fall either way by rounding
QUARTERS = 4


class BatchDecoder(Protocol):
    """Answers a batch of requests, all of one decoder."""

    def answer(self, requests: Sequence[GenerationRequest]) -> Answers: ...


@dataclass
class LockstepContestant:
    """Groups of `rows` requests, one after another."""

    decoder: BatchDecoder
    requests: Sequence[GenerationRequest]
    rows: int
    answers: Answers = ()

    def run(self) -> None:
        self.answers = [answer for group in self.groups() for answer in self.decoder.answer(group)]

    def groups(self) -> list[Sequence[GenerationRequest]]:
        return [self.requests[i : i + self.rows] for i in range(0, len(self.requests), self.rows)]


def measure_lockstep(setting: Setting) -> PartResult:
    """Tokens/s of both. Raises JobError where answers differ by more than rounding explains."""
    rows = setting.config.batch
    requests = lockstep_requests(setting)
    engine = setting.engine(requests, rows)  # first: it packs the linear layers, which both then use
    contestants: dict[str, Contestant] = {
        name: EngineContestant(engine, [replace(r, decode=replace(r.decode, fused=fused)) for r in requests])
        for fused, name in ENGINE.items()
    }
    rival = LockstepContestant(LockstepDecoder(setting.backbone), requests, rows)
    contestants[LOCKSTEP] = rival
    contestants[LOCKSTEP_ROWS] = LockstepContestant(LockstepRows(engine.decoder), requests, rows)
    times = compete("lockstep", contestants, setting)
    if setting.exact:
        for name in contestants:
            check_equal(name, contestants[name].answers, rival, setting)
    lines: list[dict[str, Any]] = [
        {
            **line("lockstep", rows, name, contestants, times),
            "equal to lock-step": share_equal(contestant.answers, rival.answers),
        }
        for name, contestant in contestants.items()
    ]
    ratios = {
        f"{name} over {other}, batch {rows}": over(name, other, contestants, times)
        for name in ENGINE.values()
        for other in (LOCKSTEP, LOCKSTEP_ROWS)
    }
    return PartResult(lines, ratios)


def lockstep_requests(setting: Setting) -> list[GenerationRequest]:
    """Ragged in prompt and answer: where no stop token ends them, answers are 1 to 4 quarters of max_tokens long."""
    count = setting.config.batch * setting.config.per_slot
    requests = setting.requests(replace(setting.blocks, fused="off"), count)
    if setting.adapted:
        return requests
    return [
        replace(request, max_tokens=max(1, request.max_tokens * (1 + i % QUARTERS) // QUARTERS))
        for i, request in enumerate(requests)
    ]


def check_equal(name: str, answers: Answers, rival: LockstepContestant, setting: Setting) -> None:
    """Raises JobError for an answer that differs although no decision of its row was close."""
    different = [i for i, (a, b) in enumerate(zip(answers, rival.answers, strict=True)) if tuple(a) != tuple(b)]
    if not different:
        return
    tracing = LockstepDecoder(setting.backbone, margins=True)
    margins = [margin for group in rival.groups() for margin in tracing.decode(group).margin.tolist()]
    for i in different:
        if margins[i] >= CLOSE:
            raise JobError(
                f"lockstep: answer {i} of `{name}` differs from the lock-step one, and no decision in it was closer "
                f"than {margins[i]:.1e}: one of the two decoders is wrong."
            )
