"""The generated tasks: checkers are exact, splits never meet, samples are stable."""

from __future__ import annotations

import dataclasses
import random
import string
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pipelines.tasks import DRAWS, KINDS, Task, generate, kinds_named
from pipelines.tasks import check as checkers

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
draws = st.integers(0, DRAWS - 1)


def drawn(kind, draw: int) -> Task:
    return kind.task(kind.make(random.Random(f"{kind.name} {draw}")))


def corrupted(answer: str, kind: str, place: int, letter: str) -> str:
    """The answer with one letter or digit of its final value exchanged."""
    start = 0 if kind.startswith(("json", "lines")) else answer.rfind("\n") + 1
    start = answer.rfind("Answer: ") + len("Answer: ") if "Answer: " in answer else start
    places = [i for i in range(start, len(answer)) if answer[i].isalnum()]
    at = places[place % len(places)]
    new = str((int(answer[at]) + 1) % 10) if answer[at].isdigit() else letter
    return answer[:at] + new + answer[at + 1 :]


@every_kind
@settings(max_examples=8, deadline=None)
@given(draw=draws)
def test_the_worked_answer_passes_its_own_checker_in_any_layout(kind, draw):
    task = drawn(kind, draw)
    assert task.check(task.answer)
    assert task.check("Sure, here it is.\n\n" + task.answer + "\n")
    assert task.check(task.answer.replace("Answer: ", "**Answer:** "))


@every_kind
@settings(max_examples=8, deadline=None)
@given(draw=draws, place=st.integers(0, 200), letter=st.sampled_from("ø"))
def test_one_wrong_letter_in_the_value_fails(kind, draw, place, letter):
    task = drawn(kind, draw)
    assert not task.check(corrupted(task.answer, kind.name, place, letter))


@every_kind
@settings(max_examples=8, deadline=None)
@given(first=draws, second=draws)
def test_the_answer_of_another_problem_fails(kind, first, second):
    task, other = drawn(kind, first), drawn(kind, second)
    if task.problem.expected != other.problem.expected:
        assert not task.check(other.answer)


@every_kind
@settings(max_examples=10, deadline=None)
@given(draw=draws, text=st.text(max_size=60))
def test_a_checker_survives_any_text(kind, draw, text):
    assert drawn(kind, draw).check(text) in (True, False)
    assert not drawn(kind, draw).check("")


@every_kind
def test_prompts_are_short_and_answers_are_dense(kind):
    for draw in range(50):
        task = drawn(kind, draw)
        assert len(task.problem.prompt.split()) <= 40
        assert 8 <= len(task.answer) <= 250


def test_train_and_held_out_never_share_a_problem_whatever_the_seeds():
    train = {(t.kind, t.problem.key) for t in generate("train", 6000, seed=0)}
    held_out = {(t.kind, t.problem.key) for t in generate("held_out", 1500, seed=7)}
    assert len(train) == 6000 and len(held_out) == 1500
    assert not train & held_out


def test_a_prompt_of_the_held_out_split_is_no_training_prompt():
    train = {t.problem.prompt for t in generate("train", 6000, seed=0)}
    assert not train & {t.problem.prompt for t in generate("held_out", 1500, seed=7)}


def test_the_kinds_take_turns():
    counts = Counter(task.kind for task in generate("train", 10 * len(KINDS), seed=3))
    assert set(counts) == set(KINDS) and set(counts.values()) == {10}


def test_the_same_seed_gives_the_same_tasks_and_a_longer_sample_starts_with_the_shorter():
    short, long = list(generate("train", 50, seed=1)), list(generate("train", 200, seed=1))
    assert long[:50] == short
    assert list(generate("train", 50, seed=2)) != short


def test_ids_are_distinct_and_name_the_problem_not_the_order():
    tasks = {task.id: task for task in generate("train", 2000, seed=0)}
    assert len(tasks) == 2000
    again = [task for task in generate("train", 2000, seed=5) if task.id in tasks]
    assert all(tasks[task.id].problem.key == task.problem.key for task in again)


def test_more_tasks_than_there_are_is_an_error_that_says_how_many_there_are():
    kinds = [KINDS["unit_convert"], KINDS["word_share"]]
    with pytest.raises(UserError, match=r"only \d+ distinct train tasks") as caught:
        list(generate("train", 100, seed=0, kinds=kinds, draws=53))
    most = int(str(caught.value).split("only ")[1].split()[0])
    assert len(list(generate("train", most, seed=4, kinds=kinds, draws=53))) == most


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_an_impossible_count_is_refused_at_once(count):
    with pytest.raises(UserError, match="count of generated tasks"):
        generate("train", count, seed=0)


def test_an_unknown_split_is_refused():
    with pytest.raises(UserError, match="train, held_out"):
        generate("test", 1, seed=0)


def test_a_task_is_plain_data():
    task = next(generate("train", 1, seed=0))
    assert dataclasses.is_dataclass(task)
    assert task.chat() == {"id": task.id, "messages": [*task.messages, {"role": "assistant", "content": task.answer}]}


@pytest.mark.parametrize(
    ("check", "expected", "right", "wrong"),
    [
        (
            checkers.number,
            1200,
            ["Answer: 1,200", "answer = $1200.00 each", "Answer:\n1200"],
            ["Answer: 12 00", "1200"],
        ),
        (checkers.number, 5, ["Answer: 4\nNo. Answer: 5."], ["Answer: 5\nAnswer: 4", "Answer: 5 or 6", "Answer: 50"]),
        (
            checkers.items,
            ["7", "12"],
            ["Answer: [7, 12]", "Answer: 7,12."],
            ["Answer: 12, 7", "Answer: 7", "Answer: 7 12"],
        ),
        (checkers.exact, "RED CAT", ['Answer: "RED  CAT"'], ["Answer: red cat", "RED CAT"]),
        (checkers.letters, "cba", ["Answer: c-b-a", "Answer: CBA"], ["Answer: a b c"]),
        (
            checkers.json_object,
            {"a": 1, "b": "x"},
            ['so {"z": 0}\n```{"b":"x", "a":1.0}```'],
            ['{"a": "1", "b": "x"}', '{"a": 1}', "{"],
        ),
        (
            checkers.key_values,
            {"Day": "Monday"},
            ["Here:\n- **Day:** Monday."],
            ["Day: Monday\nHost: Ana", "Day Monday"],
        ),
        (
            checkers.csv_line,
            ["Ana", "May 3"],
            ['name,day\nAna, "May 3"', "```\nAna,May 3\n```"],
            ["Ana,May 3,", "Ana", ""],
        ),
    ],
)
def test_checkers_compare_values_not_layout(check, expected, right, wrong):
    assert [check(expected, text) for text in right] == [True] * len(right)
    assert [check(expected, text) for text in wrong] == [False] * len(wrong)


def test_no_word_of_the_vocabulary_is_empty_or_double():
    from pipelines.tasks import words

    for name in ("NAMES", "CITIES", "THINGS", "GOODS", "ITEMS", "JOBS", "COLOURS", "EVENTS"):
        vocabulary = getattr(words, name)
        assert len(set(vocabulary)) == len(vocabulary)
        assert all(word and set(word) <= set(string.ascii_letters) for word in vocabulary)


def test_a_kind_is_found_by_its_name():
    assert all(kind.name == name for name, kind in KINDS.items())
    assert all(task.family is KINDS[task.kind] for task in islice(generate("train", 31, seed=0), 31))


def test_kinds_are_chosen_by_name_in_the_registrys_order() -> None:
    chosen = kinds_named(["json_trip", "word_add"])
    assert [kind.name for kind in chosen] == ["word_add", "json_trip"]
    assert {task.kind for task in generate("train", 6, 0, kinds=chosen)} == {"word_add", "json_trip"}
    assert kinds_named(()) == tuple(KINDS.values())
    with pytest.raises(UserError, match="'json_tripp' is no kind of the generated tasks: did you mean"):
        kinds_named(["json_tripp"])
