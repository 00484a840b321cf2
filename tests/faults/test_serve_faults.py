"""Serving survives what breaks it: under load every answer stays right, and what is not answered is told so properly.

One of each in `make test`; `make test-faults` does it at length, and `python -m tests.faults.serve_table` writes what
came of that into docs/benches/faults.json.
"""

from __future__ import annotations

import pytest

from pipelines.benches.serving.soak import SoakBenchConfig, soak, warm_up
from tests.api.successor import letters_after
from tests.faults.leaving import measure
from tests.faults.scenarios import SCENARIOS, Scenario, befall
from tests.faults.serving import LETTERS, Rig

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_quiet_server_gives_every_question_its_own_known_answer(served: Rig) -> None:
    assert len({question.answer for question in served.questions}) == len(LETTERS)
    greedy = [(i, q) for i, q in enumerate(served.questions) if q.fields["temperature"] == 0]
    for number, question in greedy:
        assert question.answer is not None
        assert question.answer.text == letters_after(LETTERS[number], question.fields["max_tokens"])
    drawn = [q.answer.text for q in served.questions if q.fields["temperature"] and q.answer is not None]
    assert any(text not in letters_after(text[:1], 300) for text in drawn if text[:1] in LETTERS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_no_answer_is_wrong_and_no_request_is_lost(served: Rig, scenario: Scenario, at_length: bool) -> None:
    missing = scenario.missing(served) or (None if scenario.quick or at_length else "only at length")
    if missing:
        pytest.skip(missing)
    report = befall(served, scenario, scenario.often if at_length else 1)
    tally = report.tally
    assert tally is not None
    times = f"answered {report.answered}, whole {report.whole} s after the fault"
    print(f"{scenario.name}: {tally.line()}, {times}")
    assert tally.wrong == 0 and tally.lost == 0, "\n".join(tally.complaints[:20])
    assert tally.struck > 0, "no request was under way: the fault met nothing"


def test_the_pages_of_a_client_that_leaves_are_free_within_a_round(served: Rig) -> None:
    served.settle()
    rounds = sorted(leaving.rounds for leaving in measure(served, 3))
    assert rounds[1] <= 1 and rounds[-1] <= 3, "the one that runs; a busy machine may notice it a little later"


def test_the_soak_reports_latency_and_memory_of_a_running_service(served: Rig) -> None:
    config = SoakBenchConfig(minutes=0.05, calibrate_s=1, sample_s=0.05, warm_share=0, warm_requests=30)
    served.settle()
    assert warm_up(config, served.target, served.questions).right == 30
    load, *memory = soak(config, served.service, served.questions)
    assert load["wrong"] == load["lost"] == load["errors"] == 0 and load["right"] == load["requests"] > 0
    assert load["p99 s"] >= load["p50 s"] > 0 and load["TTFT p50 s"] > 0
    assert [line["process"] for line in memory] == ["gateway", "proxy", "replica", "controller"]
    assert all(line["most MiB"] > 50 and line["within noise"] in ("yes", "no") for line in memory)
