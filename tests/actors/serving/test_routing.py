"""The prefix-aware router as Serve runs it, over replicas that only say who they are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from actors.serve_args import RoutingArgs
from actors.serving.ranking import PrefixReport
from actors.serving.routing import PrefixRouter, router_config
from model.decoding import GenerationRequest

DEPLOYMENT = DeploymentID("EngineReplica", "app")
PROMPT = tuple(range(100, 132))


def report(prompt: Iterable[int] = (), backlog: float = 0.0, at: float = 0.0) -> dict[str, Any]:
    empty = PrefixReport(at, 8, {"ar": b"a", "diffusion": b"d"}, frozenset(), backlog, 10.0, 1.0)
    keys = frozenset(key for chain in empty.chains(tuple(prompt), "diffusion") for key in chain)
    return {"": PrefixReport(at, 8, empty.salts, keys, backlog, 10.0, 1.0).pack()}


def replica(name: str, stats: dict[str, Any] | None = None, *, queue: int = 0, models: Iterable[str] = ()) -> Any:
    """What a router looks at of a running replica. queue: its answer when it is asked how long its queue is."""

    async def get_queue_len(*, deadline_s: float) -> int:
        return queue

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT),
        routing_stats=stats or {},
        max_ongoing_requests=10,
        multiplexed_model_ids=set(models),
        get_queue_len=get_queue_len,
        node_id="node",
        availability_zone=None,
    )


def call(
    request_id: str = "r", prompt: tuple[int, ...] = PROMPT, model: str = "", answers: int = 1, **metadata: Any
) -> PendingRequest:
    """A call of `generate`, made in a running event loop. answers: to the one prompt."""
    about = RequestMetadata(
        **{"request_id": request_id, "internal_request_id": request_id, **metadata}, multiplexed_model_id=model
    )
    requests = tuple(GenerationRequest(id=request_id, prompt_ids=prompt, max_tokens=5) for _ in range(answers))
    return PendingRequest(args=[requests], kwargs={}, metadata=about)


def with_router(replicas: list[Any], act: Callable[[PrefixRouter], Awaitable[Any]], most_extra: float = 1000) -> Any:
    async def main() -> Any:
        router = PrefixRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        router.initialize_state(most_extra_tokens=most_extra, remember_s=10)
        router.update_replicas(replicas)
        return await act(router)

    return asyncio.run(main())


async def chosen(router: PrefixRouter, pending: PendingRequest) -> str:
    found = await asyncio.wait_for(router._choose_replica_for_request(pending), 20)
    router.on_request_routed(pending, found.replica_id, None)
    return str(found.replica_id.unique_id)


def test_a_request_goes_to_the_replica_that_reported_its_prefix() -> None:
    replicas = [replica("a", report()), replica("b", report(PROMPT, backlog=900)), replica("c", report())]
    for _ in range(5):
        assert with_router(replicas, lambda router: chosen(router, call())) == "b"


def test_a_follow_up_goes_where_its_conversation_went_before_any_report_says_so() -> None:
    async def act(router: PrefixRouter) -> None:
        first = await chosen(router, call("r1"))
        for turn in range(2, 8):
            assert await chosen(router, call(f"r{turn}", PROMPT + tuple(range(8 * turn)))) == first

    with_router([replica(name, report()) for name in "abcd"], act, most_extra=10_000)


def test_a_burst_is_spread_before_any_report_says_so() -> None:
    async def act(router: PrefixRouter) -> list[str]:
        return [await chosen(router, call(f"r{i}", tuple(range(i, 700 + i)))) for i in range(8)]

    assert sorted(with_router([replica(name, report()) for name in "abcd"], act)) == list("aabbccdd")


LONG_PROMPT = tuple(range(700))


def test_what_has_ended_counts_against_its_replica_no_more() -> None:
    replicas = [replica("a", report()), replica("b", report(backlog=400))]

    async def act(router: PrefixRouter) -> None:
        assert await chosen(router, call("r1", LONG_PROMPT)) == "a"
        assert await chosen(router, call("r2", PROMPT)) == "b", "a has 700 tokens before it, b 400"
        router.on_request_completed(replicas[0].replica_id, "r1")
        assert await chosen(router, call("r3", PROMPT[::-1])) == "a"

    with_router(replicas, act, most_extra=0)


def test_calls_of_one_http_request_count_each_by_itself() -> None:
    """A run that is begun again is another call under the same request id."""
    replicas = [replica("a", report()), replica("b", report(backlog=1000))]

    async def act(router: PrefixRouter) -> None:
        for number in range(2):
            pending = call("same", LONG_PROMPT[number:], internal_request_id=f"call {number}")
            assert await chosen(router, pending) == "a"
        router.on_request_completed(replicas[0].replica_id, "call 0")
        assert await chosen(router, call("next")) == "a", "700 tokens are left there"
        router.on_request_completed(replicas[0].replica_id, "same")
        assert router._ledger.unreported(replicas[0].replica_id, 0) > 700, "nothing ends by the request's id"

    with_router(replicas, act, most_extra=0)


def test_every_answer_of_a_call_counts() -> None:
    replicas = [replica("a", report()), replica("b", report(backlog=700))]

    async def act(router: PrefixRouter) -> str:
        assert await chosen(router, call("r1", tuple(range(8)), answers=200)) == "a"
        return await chosen(router, call("r2"))

    assert with_router(replicas, act, most_extra=0) == "b", "200 answers of 5 tokens"


def test_a_replica_with_the_prefix_and_too_much_before_it_is_passed_over() -> None:
    for backlog, expected in ((900, "b"), (1300, "a")):
        replicas = [replica("a", report()), replica("b", report(PROMPT, backlog=backlog))]
        assert with_router(replicas, lambda router: chosen(router, call()), most_extra=1000) == expected


def test_a_full_replica_is_passed_over_for_the_next() -> None:
    replicas = [replica("a", report(), queue=0), replica("b", report(PROMPT), queue=10)]
    assert with_router(replicas, lambda router: chosen(router, call())) == "a"


def test_a_dead_replica_is_never_chosen_again_even_if_it_is_still_listed() -> None:
    replicas = [replica("a", report()), replica("b", report(PROMPT))]

    async def act(router: PrefixRouter) -> None:
        assert await chosen(router, call("r1")) == "b"
        router.on_replica_actor_died(replicas[1].replica_id)
        assert await chosen(router, call("r2")) == "a"
        router.update_replicas(replicas)  # the controller has not noticed
        assert await chosen(router, call("r3")) == "a"
        assert set(router.curr_replicas) == {replicas[0].replica_id}, "broadcasts skip it too"
        router.update_replicas([replicas[0], replica("b2", report(range(40)))])
        assert await chosen(router, call("r4", tuple(range(40)))) == "b2", "its successor is another replica"

    with_router(replicas, act)


def test_two_calls_of_one_http_request_that_wait_at_once_both_get_a_replica() -> None:
    async def act(router: PrefixRouter) -> None:
        waiting = [asyncio.create_task(chosen(router, call("same"))) for _ in range(3)]
        await asyncio.sleep(0)
        router.update_replicas([replica("a", report())])
        assert await asyncio.gather(*waiting) == ["a", "a", "a"]

    with_router([], act)


def test_a_model_s_requests_go_to_the_replicas_that_have_it_loaded() -> None:
    replicas = [replica("a", report(PROMPT)), replica("b", report(), models=["tuned"])]
    assert with_router(replicas, lambda router: chosen(router, call(model="tuned"))) == "b"
    assert with_router(replicas, lambda router: chosen(router, call())) == "a"


def test_a_call_without_a_prompt_and_a_replica_without_a_report_are_fine() -> None:
    async def act(router: PrefixRouter) -> str:
        pending = call()
        pending.args = []
        return await chosen(router, pending)

    assert with_router([replica("a")], act) == "a"
    assert with_router([replica("a")], lambda router: chosen(router, call())) == "a"


def test_serve_is_told_of_the_router_only_where_there_is_a_choice() -> None:
    chosen = router_config(RoutingArgs(), replicas=2)
    assert chosen.request_router_class == "actors.serving.routing:PrefixRouter"
    assert chosen.request_routing_stats_period_s == 2
    for unheard in (router_config(RoutingArgs(), replicas=1), router_config(RoutingArgs(prefix=False), replicas=2)):
        assert unheard.is_default_request_router() and unheard.request_routing_stats_period_s > 1000
