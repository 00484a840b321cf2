"""Serving survives what breaks it: under load every answer stays right, and what is not answered is told so properly.

One of each in `make test`; `make test-faults` does it at length, and `python -m tests.faults.serve_table` writes what
came of that into docs/benches/faults.json.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.successor import letters_after
from tests.faults.scenarios import SCENARIOS, Scenario, befall
from tests.faults.serving import LETTERS, Rig, rig

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("faults")) as running:
        yield running


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
    times = f"answered {report.answered}, gone {report.gone}, whole {report.whole} s after the fault"
    print(f"{scenario.name}: {tally.line()}, {times}")
    assert tally.wrong == 0 and tally.lost == 0, "\n".join(tally.complaints[:20])
    assert tally.struck > 0, "no request was under way: the fault met nothing"
