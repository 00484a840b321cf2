"""Which replica a prompt goes to: the ranking on numbers, the ledger on a clock, reports of a real engine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.loop import Engine
from actors.engine.together import generate_all
from actors.serving.ranking import MOST_PAGES, SAME_BACKLOG, SHORT, Candidate, Ledger, PrefixReport, rank
from actors.serving.routing_stats import prefix_report
from model.backbone import Backbone
from model.pages import PagePool, chain_keys
from tests.decoding import BLOCK, make_request, prompt_of

EXTRA = 4000.0


def best(*candidates: Candidate) -> list[object]:
    return rank(candidates, EXTRA)[0]


# ------------------------------------------------------------------------------------------------- the ranking
def test_the_longest_cached_prefix_wins_over_a_shorter_backlog() -> None:
    assert best(Candidate("a", 64, 3000), Candidate("b", 32, 1000), Candidate("c", 0, 0)) == ["a"]


def test_without_a_cached_prefix_the_shortest_backlog_wins() -> None:
    assert best(Candidate("a", 0, 3000), Candidate("b", 0, 1000), Candidate("c", 0, 9000)) == ["b"]


def test_a_hot_prefix_does_not_overload_its_replica() -> None:
    assert best(Candidate("a", 64, EXTRA), Candidate("b", 0, 0)) == ["a"]
    assert best(Candidate("a", 64, EXTRA + 1), Candidate("b", 0, 0)) == ["b"]
    assert best(Candidate("a", 640, EXTRA + 1), Candidate("b", 32, 500), Candidate("c", 0, 0)) == ["b"], "the next best"


def test_of_two_that_hold_the_same_prefix_the_less_busy_is_first() -> None:
    assert best(Candidate("a", 64, 3000), Candidate("b", 64, 1000)) == ["b"]
    assert best(Candidate("a", 64, 100), Candidate("b", 64, 0)) == ["a", "b"], "Serve asks them for their queues"


def test_the_others_follow_by_their_backlog_as_a_fallback() -> None:
    ranked = rank(
        [Candidate("a", 0, 5000), Candidate("b", 64, 3000), Candidate("c", 0, 0), Candidate("d", 0, 9)], EXTRA
    )
    assert ranked == [["b"], ["c", "d"], ["a"]]
    assert rank([], EXTRA) == []


@given(st.lists(st.tuples(st.sampled_from([0, 32, 64]), st.floats(0, 20_000)), min_size=1, max_size=9))
def test_every_replica_is_offered_once_and_the_first_is_within_the_bound(shapes: list[tuple[int, float]]) -> None:
    candidates = [Candidate(i, cached, backlog) for i, (cached, backlog) in enumerate(shapes)]
    ranked = rank(candidates, EXTRA)
    assert sorted(i for group in ranked for i in group) == list(range(len(shapes)))
    shortest = min(backlog for _, backlog in shapes)
    assert all(shapes[i][1] <= shortest + EXTRA + SAME_BACKLOG for i in ranked[0])


# ------------------------------------------------------------------------------------------------- the ledger
class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


CHAIN = [bytes([i]) * SHORT for i in range(4)]


def test_a_prompt_sent_a_moment_ago_counts_as_cached_until_reports_would_say_so() -> None:
    clock = Clock()
    ledger = Ledger(remember_s=10, clock=clock)
    ledger.record("a", "r", [CHAIN[:3]], load=0)
    assert ledger.pages("a", CHAIN, frozenset()) == 3
    assert ledger.pages("b", CHAIN, frozenset()) == 0
    assert ledger.pages("b", CHAIN, frozenset(CHAIN[:2])) == 2
    assert ledger.pages("b", CHAIN, frozenset(CHAIN[1:])) == 0, "only from the beginning on"
    clock.now += 10
    assert ledger.pages("a", CHAIN, frozenset()) == 0
    assert ledger.pages("a", CHAIN, frozenset(CHAIN[:1])) == 1


def test_what_was_sent_after_the_report_adds_to_the_backlog_until_it_ends() -> None:
    clock = Clock()
    ledger = Ledger(remember_s=10, clock=clock)
    for request_id, load in (("r1", 100.0), ("r2", 20.0), ("r3", 3.0)):
        ledger.record("a", request_id, [], load)
        clock.now += 1
    assert ledger.unreported("a", reported_at=0) == 123
    assert ledger.unreported("a", reported_at=100) == 23, "the report knows the first"
    ledger.ended("a", "r2")
    assert ledger.unreported("a", reported_at=100) == 3
    assert ledger.unreported("b", reported_at=0) == 0


def test_a_call_that_is_sent_again_counts_once() -> None:
    clock = Clock()
    ledger = Ledger(remember_s=10, clock=clock)
    for _ in range(3):
        ledger.record("a", "r", [], 100)
        clock.now += 1
    assert ledger.unreported("a", reported_at=0) == 100
    ledger.ended("a", "r")
    assert ledger.unreported("a", reported_at=0) == 0


def test_the_ledger_is_bounded_and_forgets_who_is_gone() -> None:
    ledger = Ledger(remember_s=10, most_keys=2, clock=Clock())
    ledger.record("a", "r", [CHAIN], load=5)
    assert ledger.pages("a", CHAIN[2:], frozenset()) == 2 and ledger.pages("a", CHAIN, frozenset()) == 0
    ledger.forget_all_but(["b"])
    assert ledger.pages("a", CHAIN[2:], frozenset()) == 0 and ledger.unreported("a", 0) == 0


# ------------------------------------------------------------------------------------------------- reports
def cached_by(report: PrefixReport, prompt: tuple[int, ...], mode: str) -> int:
    ledger = Ledger(remember_s=1)
    return max(ledger.pages("a", chain, report.keys) for chain in report.chains(prompt, mode)) * report.page_size


@pytest.mark.parametrize("mode", ["ar", "diffusion"])
def test_a_report_foretells_what_the_engine_finds_in_its_cache(sharp_backbone: Backbone, mode: str) -> None:
    engine = Engine(sharp_backbone)
    prompt = prompt_of(5 * BLOCK)
    assert cached_by(prefix_report(engine), prompt, mode) == 0
    (first,) = generate_all(engine, [make_request("a", prompt, 2 * BLOCK, mode=mode)])
    report = PrefixReport.unpack(prefix_report(engine).pack())
    longer = prompt + first.token_ids[:BLOCK] + prompt_of(5, seed=1)
    (second,) = generate_all(engine, [make_request("b", longer, 4, mode=mode)])
    assert second.cached_tokens >= 5 * BLOCK
    assert cached_by(report, longer, mode) == cached_by(report, longer, "auto") == second.cached_tokens
    assert cached_by(report, longer, "ar" if mode == "diffusion" else "diffusion") == 0, "modes share no pages"
    assert cached_by(report, prompt_of(5 * BLOCK, seed=9), mode) == 0


def test_a_report_survives_its_journey(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    generate_all(engine, [make_request("a", prompt_of(5 * BLOCK), 4)])
    report = prefix_report(engine)
    assert report.keys and PrefixReport.unpack(report.pack()) == report
    assert replace(report, answer_length=10, token_cost=2).cost(uncached=7, max_tokens=5) == 17


def test_a_prompt_is_looked_at_only_so_far() -> None:
    report = PrefixReport(0, 2, {"ar": b"s"}, frozenset(), 0, 0, 0)
    assert [len(chain) for chain in report.chains(range(10 * MOST_PAGES), "ar")] == [MOST_PAGES]


def test_of_many_cached_pages_those_in_use_and_the_latest_are_reported() -> None:
    pool = PagePool(6)
    keys = chain_keys(b"", np.arange(6), 1)
    pages = [pool.take() for _ in keys]
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.release(pages[:5])
    assert set(pool.known(100)) == set(keys)
    assert pool.known(3) == [keys[5], keys[4], keys[3]]


def test_the_ranking_needs_neither_torch_nor_ray() -> None:
    code = "import sys, actors.serving.ranking; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
