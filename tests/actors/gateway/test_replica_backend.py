"""The gateway's backend over two real engine replicas in this process: what is lost with one goes on at the other."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors.engine.events import Delta, Finished
from actors.gateway import replicas as module
from actors.gateway.backend import Unavailable
from actors.gateway.replicas import ReplicaBackend
from actors.protocol.calls import choices_of
from actors.serve_args import ServeArgs
from actors.serving.replica import EngineReplica, Events
from model.decoding import GenerationRequest, GenerationResult, SamplingParams
from tests.api.successor import build_successor_model, successor_tokenizer

Cut = Callable[[Events], bool]


class Responses:
    """The answer of a streaming call: a replica's own events, until `cut` says that its process is gone."""

    def __init__(self, events: AsyncIterator[Events], cut: Cut) -> None:
        self._events, self._cut = events, cut

    async def __aiter__(self) -> AsyncIterator[Events]:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for several in events:
                yield several
                if self._cut(several):
                    raise ActorDiedError()

    def cancel(self) -> None:
        pass


class Handle:
    """As much of a Serve handle as the backend uses: calls go to one replica after the other, a broadcast to all.

    cuts: after which events the process of each replica goes away. listed: whether a broadcast reaches anyone.
    """

    def __init__(self, replicas: tuple[EngineReplica, ...], *cuts: Cut, listed: bool = True) -> None:
        self._replicas, self._cuts, self._listed = replicas, cuts, listed
        self._turns = itertools.count()
        self.runs: list[tuple[GenerationRequest, ...]] = []

    def options(self, *, method_name: str, **_: Any) -> Any:
        return SimpleNamespace(remote=getattr(self, f"_{method_name}"))

    def _generate(
        self, requests: tuple[GenerationRequest, ...], gateway: str, traceparent: None, asker: None, *which: Any
    ) -> Responses:
        turn = next(self._turns)
        self.runs.append(requests)
        cut = self._cuts[turn] if turn < len(self._cuts) else lambda _: False
        replica = self._replicas[turn % len(self._replicas)]
        return Responses(replica.generate(requests, gateway, traceparent, asker, *which), cut)

    def _served(self, *model: str) -> Any:
        return self._replicas[next(self._turns) % len(self._replicas)].served(*model)

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results_async() -> list[Any]:
            return [await getattr(replica, method)(*args) for replica in self._replicas if self._listed]

        return SimpleNamespace(results_async=results_async)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineReplica, ...]]:
    model = build_successor_model(tmp_path_factory.mktemp("models") / "wandering", sharpness=9.0)
    args = ServeArgs.model_validate({"model": str(model), "served_name": "tiny", "engine": {"max_rows": 4}})
    replicas = tuple(EngineReplica(args) for _ in range(2))
    yield replicas
    for replica in replicas:
        replica._shelf.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_PAUSES_S", (0.0,) * 3)
    monkeypatch.setattr(module, "LOOK_PAUSES_S", (0.0,) * 3)


def choices(count: int, request_id: str = "r", **changes: Any) -> tuple[GenerationRequest, ...]:
    """Hot draws from one prompt of several blocks; of different lengths, so that they end one after another."""
    ids = tuple(successor_tokenizer()("nonce " * 8 + "a").input_ids)
    sampling = SamplingParams(temperature=2.0, top_k=4, seed=5)
    request = GenerationRequest(id=request_id, prompt_ids=ids, max_tokens=40, sampling=sampling)
    asked = choices_of(replace(request, **changes), count)
    return tuple(replace(one, max_tokens=one.max_tokens - 24 * (i == 1)) for i, one in enumerate(asked))


async def answers(backend: ReplicaBackend, asked: tuple[GenerationRequest, ...]) -> dict[str, GenerationResult]:
    """Every answer; what was told piece by piece is what it says in the end."""
    told = {request.id: "" for request in asked}
    ended = {}
    async with aclosing(backend.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Delta):
                told[event.id] += event.text
            elif isinstance(event, Finished):
                ended[event.id] = event.result
    assert {id_: result.text for id_, result in ended.items()} == told
    return ended


def words(results: dict[str, GenerationResult]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {id_: (result.token_ids, result.text) for id_, result in results.items()}


def used(replicas: tuple[EngineReplica, ...]) -> int:
    return sum(replica._engine.stats().pages_used for replica in replicas)


def test_choices_of_a_lost_engine_go_on_elsewhere_and_those_that_had_ended_are_not_run_again(
    pair: tuple[EngineReplica, ...],
) -> None:
    asked = choices(3)
    quiet = asyncio.run(answers(ReplicaBackend(Handle(pair)), asked))
    assert len({result.text for result in quiet.values()}) == 3

    def first_end(events: Events) -> bool:
        return any(isinstance(event, Finished) for event in events)

    handle = Handle(pair, lambda _: True, first_end)  # the first after its first events, the second after an end
    backend = ReplicaBackend(handle)
    assert words(asyncio.run(answers(backend, asked))) == words(quiet)
    assert backend.retries == 2 and not backend._wanted
    first, second, third = handle.runs
    assert [run.id for run in second] == ["r~1", "r.1~1", "r.2~1"]
    assert [run.id for run in third] == ["r~2", "r.2~2"], "r.1 had ended"
    assert [run.follows for run in (*first, *second, *third)] == [None, "r", "r", None, "r~1", "r~1", None, "r~2"]
    assert any(run.answered for run in third), "they go on behind the blocks that the client has"
    assert all(run.answered == quiet[id_].token_ids[: len(run.answered)] for id_, run in zip("r", third, strict=False))
    assert used(pair) == 0


class Line:
    """An actor's `__ray_call__` into this process."""

    def __init__(self) -> None:
        self.__ray_call__ = SimpleNamespace(remote=lambda function, *args: function(self, *args))


def test_a_word_to_the_replica_itself_frees_its_rows_where_cancelling_and_broadcasts_do_not_reach_it(
    pair: tuple[EngineReplica, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []  # calls that nobody cancels

    class Deaf(Responses):
        async def __aiter__(self) -> AsyncIterator[Events]:
            kept.append(self._events)
            async for several in self._events:
                yield several

    async def leave() -> int:
        handle = Handle(pair, listed=False)
        monkeypatch.setattr(sys.modules[__name__], "Responses", Deaf)
        async with aclosing(ReplicaBackend(handle).generate(choices(3, max_tokens=400))) as events:
            async for _ in events:
                if used(pair):
                    break
        before = pair[0]._engine.stats().rounds
        while used(pair):
            await asyncio.sleep(0.001)
        for call in kept:
            await call.aclose()
        return pair[0]._engine.stats().rounds - before

    monkeypatch.setattr(pair[0], "_actor", Line())
    assert asyncio.run(asyncio.wait_for(leave(), 60)) <= 1 and len(kept) == 1


def test_a_model_that_a_rollout_just_added_is_found_at_a_newer_replica_or_is_a_503(
    pair: tuple[EngineReplica, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pair
    asked = choices(1)

    async def nobody_has_it() -> None:
        backend = ReplicaBackend(Handle((old, old)))
        with pytest.raises(Unavailable, match="'added' yet"):
            await backend.served("added")
        with pytest.raises(Unavailable):
            async with aclosing(backend.generate(asked, None, "added")) as events:
                await anext(events)

    asyncio.run(nobody_has_it())

    async def fetch(name: str) -> Any:
        return SimpleNamespace(loaded=new._shelf.default)

    monkeypatch.setattr(new._shelf, "_further", {"added": None})
    monkeypatch.setattr(new._shelf, "_fetch", fetch)

    async def one_has_it() -> GenerationResult:
        backend = ReplicaBackend(Handle((old, new)))
        assert (await backend.served("added")).card.name == "tiny"
        async with aclosing(backend.generate(asked, None, "added")) as events:
            ended = [event.result async for event in events if isinstance(event, Finished)]
        assert backend.retries == 1
        return ended[0]

    assert asyncio.run(one_has_it()).completion_tokens == 40


def test_one_abort_frees_every_choice_of_every_run(pair: tuple[EngineReplica, ...]) -> None:
    asked = choices(4, max_tokens=400)

    async def leave() -> tuple[int, int]:
        backend = ReplicaBackend(Handle(pair, lambda _: True))
        async with aclosing(backend.generate(asked)) as events:
            async for _ in events:
                if used(pair[1:]):
                    break
            running = pair[1]._engine.stats().running
            await backend.abort("r")
            rounds = pair[1]._engine.stats().rounds
            while used(pair):
                await asyncio.sleep(0.001)
            return running, pair[1]._engine.stats().rounds - rounds

    running, rounds = asyncio.run(asyncio.wait_for(leave(), 60))
    assert running > 1 and rounds <= 1
