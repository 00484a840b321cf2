"""Many clients at once, on a thread of their own, while the caller does something to the server.

Closed: a number of clients, each asking its next question when it has its answer. Open: questions arrive at random
times, a rate of them a second, and wait for nobody. Every second request streams.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
import numpy as np

from model.errors import JobError
from pipelines.benches.serving.client import Outcome, Record, Target, ask
from pipelines.benches.serving.questions import Question

POLL_S = 0.02
REFUSED_PAUSE_S = 1.0  # a client whose connection was refused does not knock thousands of times a second


@dataclass
class Load:
    """`with Load(...)`: runs from the beginning of the block until its end, when every request has ended.

    clients: of a closed loop, with pause_s between an answer and the next question; rate: arrivals a second of an open
    loop, instead of clients. stream: None: every second request, else all or none. limit: requests, None: no end.
    records: of what has ended; running: of what has not.
    """

    target: Target
    questions: Sequence[Question]
    clients: int = 6
    pause_s: float = 0.0
    rate: float | None = None
    stream: bool | None = None
    limit: int | None = None
    seed: int = 0
    records: list[Record] = field(default_factory=list)
    running: list[Record] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _failure: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Begin nothing new and wait for what runs."""
        self._stopping.set()
        self.wait()

    def wait(self) -> None:
        """Wait for the end: of `limit` requests, or after `stop`."""
        assert self._thread is not None, "the load was not started"
        self._thread.join()
        if self._failure:
            raise self._failure[0]

    def right_since(self, moment: float) -> list[Record]:
        """The right answers to requests that began at `moment` or later, as they came in."""
        return [r for r in self.records if r.outcome is Outcome.RIGHT and r.begun >= moment]

    def await_right(self, count: int, since: float, timeout_s: float) -> list[Record]:
        """Wait for so many of them; the first of them. Raises JobError."""
        wait_for(lambda: len(self.right_since(since)) >= count, f"{count} right answers", timeout_s)
        return self.right_since(since)[:count]

    # ------------------------------------------------------------------------------------------- the load's thread
    def _run(self) -> None:
        try:
            asyncio.run(self._open() if self.rate is not None else self._closed())
        except BaseException as error:
            self._failure.append(error)

    def _turns(self) -> Iterator[tuple[Question, bool]]:
        """The questions in turn, again and again, and whether to stream: not always the same ones."""
        for number in itertools.count() if self.limit is None else range(self.limit):
            turn, place = divmod(number, len(self.questions))
            yield self.questions[place], (number + turn) % 2 == 0 if self.stream is None else self.stream

    async def _ask(self, session: aiohttp.ClientSession, question: Question, stream: bool) -> Record:
        record = Record(stream)
        self.running.append(record)
        await ask(session, self.target, question.path, question.fields, question.answer, record)
        self.running.remove(record)
        self.records.append(record)
        return record

    async def _closed(self) -> None:
        turns = self._turns()

        async def client() -> None:
            for question, stream in turns:
                record = await self._ask(session, question, stream)
                if self._stopping.is_set():
                    return
                await asyncio.sleep(REFUSED_PAUSE_S if record.outcome is Outcome.CUT else self.pause_s)

        async with self.target.session() as session:
            await asyncio.gather(*(client() for _ in range(self.clients)))

    async def _open(self) -> None:
        assert self.rate is not None
        random = np.random.default_rng(self.seed)
        at = time.monotonic()
        running: set[asyncio.Task[Record]] = set()
        async with self.target.session() as session:
            for question, stream in self._turns():
                at += random.exponential(1 / self.rate)
                while (left := at - time.monotonic()) > 0 and not self._stopping.is_set():
                    await asyncio.sleep(min(left, 0.1))
                if self._stopping.is_set():
                    break
                task = asyncio.create_task(self._ask(session, question, stream))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float, poll_s: float = POLL_S) -> None:
    """Poll until it holds. Raises JobError after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise JobError(f"Waited {timeout_s:g} s for {what}.")
        time.sleep(poll_s)
