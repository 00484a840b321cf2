"""Mixtures: the asked shares of the training tokens, from lengths alone, the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pipelines import adapt
from pipelines import prepare as prepare_job
from pipelines.adapt import AdaptConfig
from pipelines.chats.mixture import Recipe, mix
from pipelines.jobkit import main
from pipelines.prepare import PrepareConfig
from tests.pipelines.prepared import Prepared, chat, documents_of, write_lines


def recipe(*weights: float, tokens: int | None = None, repeat: float = 1.0, seed: int = 0) -> Recipe:
    return Recipe([f"source {number}" for number in range(len(weights))], weights, tokens, repeat, seed)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[float], float]:
    """Lengths, sources, weights, repeat."""
    sources = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 50), min_size=sources, max_size=80))
    source_of = [*range(sources), *draw(st.lists(st.integers(0, sources - 1), min_size=80, max_size=80))]
    weights = draw(st.lists(st.floats(0.1, 5), min_size=sources, max_size=sources))
    return np.array(lengths), np.array(source_of[: len(lengths)]), weights, draw(st.floats(0.2, 4))


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_every_source_gives_its_share_to_within_a_document(problem):
    lengths, source_of, weights, repeat = problem
    taken, portions = mix(recipe(*weights, repeat=repeat), lengths, source_of)
    totals = [portion.available * repeat / weight for portion, weight in zip(portions, weights, strict=True)]
    for number, (portion, weight) in enumerate(zip(portions, weights, strict=True)):
        target = min(totals) * weight
        of_source = taken[source_of[taken] == number]
        assert portion.tokens == lengths[of_source].sum() and portion.documents == len(of_source)
        assert target - lengths.max() - 1e-6 <= portion.tokens <= target * (1 + 1e-9)
        times = np.bincount(of_source, minlength=len(lengths))[source_of == number]
        assert times.max() - times.min() <= 1, "no document comes again before all have come"


@settings(max_examples=25, deadline=None)
@given(problem=problems(), seed=st.integers(0, 5))
def test_it_depends_on_its_arguments_alone_and_a_smaller_one_is_part_of_a_larger(problem, seed):
    lengths, source_of, weights, _ = problem
    taken, portions = mix(recipe(*weights, seed=seed), lengths, source_of)
    again, _ = mix(recipe(*weights, seed=seed), lengths, source_of)
    np.testing.assert_array_equal(taken, again)
    total = sum(portion.tokens for portion in portions)
    if total > 1:
        smaller, _ = mix(recipe(*weights, seed=seed, tokens=total // 2), lengths, source_of)
        assert set(smaller.tolist()) <= set(taken.tolist())


def test_any_stretch_of_a_mixture_is_the_mixture():
    lengths, source_of = np.full(4000, 10), np.r_[np.zeros(3000, int), np.ones(1000, int)]
    taken, _ = mix(recipe(1, 3), lengths, source_of)
    stretches = source_of[taken][: len(taken) // 40 * 40].reshape(-1, 40)
    assert (np.abs(stretches.mean(1) - 0.75) <= 0.05).all()
    for number in (0, 1):
        assert (np.diff(taken[source_of[taken] == number]) > 0).all(), "each source in its own order"


def test_a_source_that_cannot_give_its_share_is_named():
    lengths, source_of = np.full(30, 10), np.r_[np.zeros(20, int), np.ones(10, int)]
    with pytest.raises(UserError, match=r"tokens 300 is more than the 200 .*source 1 holds 100: .*raise --mixture.rep"):
        mix(recipe(1, 1, tokens=300), lengths, source_of)
    taken, portions = mix(recipe(1, 1, tokens=300, repeat=2), lengths, source_of)
    assert [portion.tokens for portion in portions] == [150, 150] and len(taken) == 30
    with pytest.raises(UserError, match="source 2 has no training document: give it the weight 0"):
        mix(recipe(1, 1, 1), lengths, source_of)
    assert mix(recipe(0, 1, 0), lengths, source_of)[0].tolist() == list(range(20, 30))


def test_the_job_mixes_its_sources(prepare, tmp_path):
    write_lines(tmp_path / "a.jsonl", [chat("aaaa", f"{n:04}") for n in range(60)])
    write_lines(tmp_path / "b.jsonl", [chat("bbbb", f"{n:04}") for n in range(20)])
    words = ["--data", f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl", "--mixture.weights", "1", "2"]
    result = prepare(*words, "--mixture.repeat", "2")
    documents = documents_of(result.rows()).values()
    letters = [bytes(token - 11 for token in document.input_ids[6:10]) for document in documents]
    assert len(letters) == 60 and len(set(letters)) == 2
    assert sorted(letters.count(letter) for letter in set(letters)) == [20, 40]
    first, second = result.stats["mixture"]
    assert (first["share"], first["passes"], second["share"], second["passes"]) == (0.3333, 0.3333, 0.6667, 2.0)
    assert result.stats["documents"] == 80
    assert sum(row["tokens"] for row in result.stats["mixture"]) == result.stats["tokens"]
    other = prepare(*words, "--mixture.repeat", "2", "--workers", "1", "--read.shard_bytes", "500", output="other")
    assert other.bytes() == result.bytes()


def test_adapt_mixes_the_chats_that_it_packs_itself(prepare, tmp_path, tiny_model, capsys):
    """Up to the training, for which these workers never come."""
    write_lines(tmp_path / "a.jsonl", [chat("aaaa", f"{n:04}") for n in range(60)])
    write_lines(tmp_path / "b.jsonl", [chat("bbbb", f"{n:04}") for n in range(20)])
    words = ["--data", f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl", "--mixture.weights", "1", "2"]
    words += ["--mixture.repeat", "2", "--mixture.tokens", "900"]
    alone = prepare(*words, output="alone")
    train = ["--train.workers", "1", "--train.device", "cpu", "--train.cpus_per_worker", "64", "--cluster.wait_s", "0"]
    pack = ["--pack.block_size", "8", "--pack.context_length", "128"]
    common = ["--model", str(tiny_model), "--output", str(tmp_path / "adapted"), *pack, *train]
    assert main("adapt", AdaptConfig, adapt.run, adapt.plan, [*common, *words]) == 1
    assert "The cluster did not offer 1 worker of 64 CPUs" in capsys.readouterr().err
    assert Prepared(0, tmp_path / "adapted" / "rows").bytes() == alone.bytes()
    assert [row["weight"] for row in alone.stats["mixture"]] == [1, 2]


@pytest.mark.parametrize(("job", "config"), [(prepare_job, PrepareConfig), (adapt, AdaptConfig)])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--mixture.weights", "1"], "mixture.weights has 1 numbers, --data has 2 words: give one weight each"),
        (["--mixture.weights", "0", "0"], "must be at least 0, and not all of them 0"),
        (["--mixture.weights", "1", "-1"], "must be at least 0, and not all of them 0"),
        (["--mixture.tokens", "5"], "mixture.tokens and mixture.repeat need mixture.weights"),
    ],
)
def test_weights_that_make_no_sense_are_exit_2(tmp_path, capsys, job, config, words, expected):
    data = ["--data", "a.jsonl", "b.jsonl", "--output", str(tmp_path / "o")]
    assert main("job", config, job.run, job.plan, [*data, *words]) == 2
    assert expected in capsys.readouterr().err


def test_sources_of_one_size_are_drawn_apart():
    """The same text in two languages, say: not the same half of both."""
    lengths, source_of = np.full(200, 10), np.r_[np.zeros(100, int), np.ones(100, int)]
    taken, _ = mix(recipe(1, 1, tokens=1000), lengths, source_of)
    halves = [set((taken[source_of[taken] == number] - 100 * number).tolist()) for number in (0, 1)]
    assert [len(half) for half in halves] == [50, 50] and halves[0] != halves[1]
