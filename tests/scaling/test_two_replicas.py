"""Two replicas of one application: conversations find their pages, the dead stay dead, redeployments lose nothing.

The tests share one deployment (a replica takes seconds to start) and run in this order; the last one deploys again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.api.successor import LETTERS, letters_after
from tests.scaling.conftest import MODEL, App, Load, Stream, wait_until
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONVERSATIONS, TURNS = 12, 3
ARGS: dict[str, Any] = {"min_replicas": 2, "max_replicas": 2}


@pytest.fixture(scope="module")
def pair(serve_port: int, slow_model: Path) -> Iterator[App]:
    from ray import serve

    app = App(serve_port, "pair")
    app.deploy(slow_model, **ARGS, engine={"max_rows": 8})
    yield app
    serve.delete("pair")


@pytest.fixture(scope="module")
def share_with_prefix_router(pair: App) -> float:
    return cached_share(pair)


def opening(number: int) -> list[int]:
    """A prompt of 64 tokens that no other conversation shares a block with."""
    letters = "".join(LETTERS[(number + i * 7) % len(LETTERS)] for i in range(63))
    ids: list[int] = tiny_tokenizer()(letters + LETTERS[number]).input_ids
    return ids


def cached_share(app: App) -> float:
    """The share of follow-up turns' prompts that was found in a cache, over conversations that take turns."""
    client = app.client()
    prompts = [opening(i) for i in range(CONVERSATIONS)]
    cached = total = 0
    for turn in range(TURNS):
        for i, prompt in enumerate(prompts):
            answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16)
            assert answer.choices[0].text == letters_after(LETTERS[(i + 16 * turn) % len(LETTERS)], 16)
            if turn:
                cached += answer.usage.prompt_tokens_details.cached_tokens
                total += answer.usage.prompt_tokens
            prompts[i] = prompt + tiny_tokenizer()(answer.choices[0].text).input_ids
    return cached / total


def engine_pids() -> list[int]:
    return [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica:pair:EngineReplica" in " ".join(process.cmdline())
    ]


def test_follow_ups_go_where_their_conversation_is_cached(share_with_prefix_router: float) -> None:
    assert share_with_prefix_router > 0.75


@pytest.mark.faults
def test_a_killed_replica_is_not_asked_again_though_it_holds_prefixes(
    pair: App, share_with_prefix_router: float
) -> None:
    before = engine_pids()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    assert cached_share(pair) > 0.5, "every answer came and was right"
    wait_until(lambda: len(engine_pids()) == 2 and pair.running() == 2, "a new replica")


def test_a_redeployment_with_other_arguments_loses_no_open_stream_and_no_new_request(
    pair: App, slow_model: Path, share_with_prefix_router: float
) -> None:
    before = set(engine_pids())
    streams = [Stream(pair, 6000) for _ in range(4)]
    wait_until(lambda: all(stream.text for stream in streams), "streams on both replicas")
    load = Load(pair, clients=2, count=20)
    pair.deploy(slow_model, **ARGS, engine={"max_rows": 6}, routing={"prefix": False})
    assert pair.running() == 2
    load.check()
    for stream in streams:
        stream.check()
    wait_until(lambda: not before & set(engine_pids()), "the old replicas' end")
    without = cached_share(pair)
    assert without < share_with_prefix_router, "Serve's own router does not look at prefixes"
