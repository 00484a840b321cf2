"""Two replicas of one application: conversations find their pages, the dead stay dead, redeployments lose nothing.

The tests share one deployment (a replica takes seconds to start) and run in this order; the last but one deploys it
again, with two gateways.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from actors.serving import replica as module
from actors.serving.replica import abort_here
from tests.api.successor import LETTERS, letters_after
from tests.exposition import Values, read, total
from tests.scaling.conftest import MODEL, PATIENCE_S, App, Load, Stream, wait_until
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONVERSATIONS, TURNS = 12, 3
STREAMED = 3500  # tokens
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


def cached_share(app: App, first: int = 0) -> float:
    """The share of follow-up turns' prompts that was found in a cache, over conversations that take turns. first: of
    their numbers."""
    client = app.client()
    prompts = [opening(first + i) for i in range(CONVERSATIONS)]
    cached = total = 0
    for turn in range(TURNS):
        for i, prompt in enumerate(prompts):
            answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16)
            assert answer.choices[0].text == letters_after(LETTERS[(first + i + 16 * turn) % len(LETTERS)], 16)
            if turn:
                cached += answer.usage.prompt_tokens_details.cached_tokens
                total += answer.usage.prompt_tokens
            prompts[i] = prompt + tiny_tokenizer()(answer.choices[0].text).input_ids
    return cached / total


def pids(deployment: str = "EngineReplica") -> list[int]:
    return [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if f"ServeReplica:pair:{deployment}" in " ".join(process.cmdline())
    ]


def replica_actors() -> dict[str, Any]:
    """The actors of all engine replicas by name, those that are being drained too."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [name for name in named if "#EngineReplica#" in name["name"] and "pair" in name["name"]]
    return {name["name"]: ray.get_actor(**name) for name in ours}


def runs_here(_: object) -> list[str]:
    """Called inside a replica: the requests that its engine has not ended."""
    return [run for replica in list(module._here) for run in replica._engine._requests]


def metrics(app: App) -> Values:
    return read(httpx.get(f"{app.url}/metrics", timeout=20, trust_env=False).text)


def gateway_requests(app: App) -> dict[str, float]:
    """How many requests each gateway holds."""
    held = "blockcast_gateway_requests"
    return {dict(labels)["replica"]: value for (name, labels), value in metrics(app).items() if name == held}


def test_follow_ups_go_where_their_conversation_is_cached(share_with_prefix_router: float) -> None:
    assert share_with_prefix_router > 0.75


@pytest.mark.faults
def test_a_killed_replica_is_not_asked_again_though_it_holds_prefixes(
    pair: App, share_with_prefix_router: float
) -> None:
    before = pids()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    assert cached_share(pair) > 0.5, "every answer came and was right"
    wait_until(lambda: len(pids()) == 2 and pair.running() == 2, "a new replica")


def test_a_redeployment_with_other_arguments_loses_no_open_stream_and_no_new_request(
    pair: App, slow_model: Path, share_with_prefix_router: float
) -> None:
    import ray

    def runs(actor: Any) -> list[str]:
        found: list[str] = ray.get(actor.__ray_call__.remote(runs_here))
        return found

    before, old = set(pids()), replica_actors()
    streams = [Stream(pair, STREAMED) for _ in range(4)]
    wait_until(lambda: all(stream.text for stream in streams), "streams on both replicas")
    load = Load(pair, clients=1, count=20)
    early = Load(pair, 1, 20, model="added", refusals=(404, 503))
    models = [{"name": "added", "model": str(slow_model)}]
    changes = {"engine": {"max_rows": 6}, "routing": {"prefix": False}, "models": models, "gateway_replicas": 2}
    deploying = threading.Thread(target=lambda: pair.deploy(slow_model, **ARGS, **changes), daemon=True)
    deploying.start()
    wait_until(lambda: pair.states().get("STOPPING", 0) > 0, "an old replica that is being drained")

    running = {run for actor in old.values() for run in runs(actor)}
    going_on = [stream for stream in streams if len(stream.text) < STREAMED * 0.9]
    assert going_on and {stream.id for stream in going_on} <= running, "each where it was, not begun again elsewhere"
    # What a gateway says to the replica itself, which reaches one that is being drained.
    left = going_on[0]
    (place,) = (actor for actor in old.values() if left.id in runs(actor))
    ray.get(place.__ray_call__.remote(abort_here, [left.id]))
    wait_until(lambda: left.id not in runs(place), "the end of the row")
    left.leave()
    streams.remove(left)

    deploying.join(PATIENCE_S)
    assert not deploying.is_alive() and pair.running() == 2
    load.check()
    wait_until(lambda: early.answered > 0, "an answer of the model that was added")
    early.check()
    for stream in streams:
        stream.check()
    wait_until(lambda: not before & set(pids()), "the old replicas' end")
    # Serve's own router takes the less busy one, whoever has the prefix; right after a start it may know one only.
    without = (cached_share(pair, first) for first in range(CONVERSATIONS, len(LETTERS) - CONVERSATIONS, CONVERSATIONS))
    assert any(share < share_with_prefix_router for share in without)


@pytest.mark.faults
def test_a_killed_gateway_takes_its_own_requests_with_it_and_no_others(pair: App) -> None:
    wait_until(lambda: len(pids("Gateway")) == 2, "two gateways, and none of the deployment before")
    streams = [Stream(pair, 600) for _ in range(8)]
    wait_until(lambda: all(stream.text for stream in streams), "streams")
    held = gateway_requests(pair)
    assert len(held) == 2 and all(held.values()), "both gateways answer"
    before = pids("Gateway")
    os.kill(before[0], signal.SIGKILL)
    errors = [stream.end() for stream in streams]
    whole = [stream for stream, error in zip(streams, errors, strict=True) if error is None]
    assert len(errors) - len(whole) in held.values() and whole
    for stream in whole:
        stream.check()
    for stream in [Stream(pair, 20) for _ in range(6)]:
        stream.check()
    wait_until(lambda: len(pids("Gateway")) == 2 and before[0] not in pids("Gateway"), "a new gateway")
    wait_until(lambda: total(metrics(pair), "blockcast_pages_used") == 0, "no row left of what the dead one asked for")
