"""Lossless decoding writes what the base model writes, whatever is drafted; with a temperature, as often as it does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from model.decoding.requests import SamplingParams
from model.two_tower.decoding import TowerRequest, Writing, log_likelihoods, write_tokens
from model.two_tower.lossless import (
    Draft,
    Drafter,
    denoiser_drafter,
    draft_length,
    target_distribution,
    verify,
    write_lossless,
)
from model.two_tower.reader import Reader, Stretch
from model.two_tower.towers import TwoTower
from tests.towers import VOCAB, shared_towers, tiny_towers

KINDS = ("qwen3", "gemma2", "nemotron_h", "qwen3_next", "lfm2")


def requests(seed: int = 0, **fields: object) -> list[TowerRequest]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [tuple(torch.randint(4, VOCAB, (n,), generator=generator).tolist()) for n in (1, 4, 7)]
    return [TowerRequest(prompt, 10 + i, **fields) for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]


def random_drafts(reader: Reader, row: Writing, head: int, count: int) -> Draft:
    generator = torch.Generator().manual_seed(head + row.stretch.length)
    return Draft(torch.randint(0, VOCAB, (count,), generator=generator))


def right_until_the_last(towers: TwoTower, wanted: list[TowerRequest]) -> Drafter:
    """An adversary: every draft is the true continuation, but for a last token that is always wrong."""
    truth = {r.prompt_ids: list(a.written) for r, a in zip(wanted, write_tokens(towers, wanted), strict=True)}

    def drafter(reader: Reader, row: Writing, head: int, count: int) -> Draft:
        done = len(row.answer.written)
        tokens = (truth[row.request.prompt_ids] + [0] * count)[done : done + count]
        return Draft(torch.tensor([*tokens[:-1], (tokens[-1] + 1) % VOCAB]))

    return drafter


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_base_models_whatever_is_drafted(kind: str) -> None:
    """An untrained denoiser in one and in two steps, random tokens, and an adversary; all rows in one batch."""
    towers, wanted = shared_towers(kind), requests()
    expected = [answer.token_ids for answer in write_tokens(towers, wanted)]
    drafters = (denoiser_drafter(1), denoiser_drafter(2), random_drafts, right_until_the_last(towers, wanted))
    for drafter in drafters:
        answers = write_lossless(towers, wanted, drafter=drafter)
        assert [answer.token_ids for answer in answers] == expected
    assert max(answers[2].accepted) == towers.config.block_size - 1  # the adversary's tokens but the last were kept


@pytest.mark.parametrize("kind", ["qwen3", "nemotron_h"])
def test_a_copy_of_the_base_model_drafts_well_and_saves_forwards(kind: str) -> None:
    """Slots after the first read a canvas of masks, so only some drafts are right; all are with a true oracle."""
    towers, wanted = shared_towers(kind), requests()
    plain = write_tokens(towers, wanted)
    truth = {r.prompt_ids: [*a.written, *[0] * 8] for r, a in zip(wanted, plain, strict=True)}

    def oracle(reader: Reader, row: Writing, head: int, count: int) -> Draft:
        done = len(row.answer.written)
        return Draft(torch.tensor(truth[row.request.prompt_ids][done : done + count]))

    answers = write_lossless(towers, wanted, drafter=oracle)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    for answer, alone in zip(answers, plain, strict=True):
        assert 3 * answer.forwards["commit"] <= alone.forwards["commit"] + 3


@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_a_stop_token_inside_a_draft_ends_the_answer_there(kind: str) -> None:
    towers, (wanted, *_) = shared_towers(kind), requests()
    (free,) = write_tokens(towers, [wanted])
    for place in range(1, len(free.token_ids), 4):
        stop = free.token_ids[place]
        request = TowerRequest(wanted.prompt_ids, wanted.max_tokens, stop_token_ids=frozenset({stop}))
        (expected,), (answer,) = (
            write_tokens(towers, [request]),
            write_lossless(towers, [request], drafter=right_until_the_last(towers, [wanted])),
        )
        assert answer.token_ids == expected.token_ids and answer.token_ids[-1] == stop
        assert answer.finish_reason == expected.finish_reason == "stop"


def test_a_request_alone_equals_the_same_request_in_a_batch() -> None:
    for kind in ("qwen2", "granitemoehybrid"):
        towers = shared_towers(kind)
        wanted = [*requests(1), *requests(2, sampling=SamplingParams(temperature=0.8, seed=5))]
        together = write_lossless(towers, wanted)
        assert [write_lossless(towers, [one])[0].token_ids for one in wanted] == [a.token_ids for a in together]


def test_what_is_read_of_a_draft_follows_what_was_kept_of_the_last_ones() -> None:
    assert draft_length([], 15) == 15
    assert draft_length([1, 1, 1, 1], 15) == 1
    assert draft_length([16, 16, 1, 1, 1, 1], 15) == 1
    assert draft_length([4, 4, 4, 4], 15) == 7
    assert [draft_length([kept], 15) for kept in (1, 2, 3, 8, 16)] == [1, 3, 5, 15, 15]


# ------------------------------------------------------------------------------------------------- with a temperature
SMALL = 8


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; outcomes with fewer than five expected are counted together."""
    total = sum(counts.values())
    large = {k: p * total for k, p in expected.items() if p * total >= 5}
    rest = total - sum(large.values())
    statistic = sum((counts[k] - e) ** 2 / e for k, e in large.items())
    left = total - sum(counts[k] for k in large)
    return statistic + ((left - rest) ** 2 / rest if rest > 0 else 0.0), len(large)


def bound(freedom: int) -> float:
    """Five standard deviations above the mean of a chi-square variable: exceeded by chance once in 100,000 or less."""
    return freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("fixed", [False, True])
def test_accepted_tokens_follow_the_target_distribution(fixed: bool) -> None:
    """The rule itself: two slots, drawn from q or fixed, give p, and the token behind follows its own p."""
    generator = torch.Generator().manual_seed(3)
    logits = 1.5 * torch.randn(3, SMALL, generator=generator, dtype=torch.float64)
    q = torch.softmax(1.5 * torch.randn(2, SMALL, generator=generator, dtype=torch.float64), -1)
    sampling = SamplingParams(temperature=0.9, top_k=6)
    p = target_distribution(logits, sampling)
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(3)]
    best = p[:2].argmax(-1)
    for seed in range(1500):
        request = TowerRequest((1,), 4, sampling=SamplingParams(temperature=0.9, top_k=6, seed=seed))
        row = Writing(request, Stretch(length=1), torch.zeros(3), torch.ones(3))
        drawn = best if fixed else torch.multinomial(q, 1, generator=generator)[:, 0]
        kept, following = verify(row, Draft(drawn, None if fixed else q), logits)
        for slot, token in enumerate([*drawn[: kept - 1].tolist(), following]):
            counts[slot][(token,)] += 1
    for slot in range(3):
        statistic, freedom = chi_square(counts[slot], {(t,): float(p[slot, t]) for t in range(SMALL)})
        assert statistic < bound(freedom), f"slot {slot}"


@pytest.mark.slow
def test_sampled_answers_are_as_frequent_as_the_base_models() -> None:
    """Pairs of tokens from whole runs of lossless decoding, against their probabilities under the context tower."""
    towers = tiny_towers("llama", torch.float32, vocab_size=SMALL, num_hidden_layers=1, initializer_range=0.5)
    likely = {(a, b): sum(log_likelihoods(towers, [[4, 5, a, b]])[0][1:]) for a in range(SMALL) for b in range(SMALL)}
    expected = {pair: float(torch.tensor(value).exp()) for pair, value in likely.items()}
    wanted = [TowerRequest((4, 5), 3, sampling=SamplingParams(temperature=1.0, seed=s)) for s in range(800)]
    answers = write_lossless(towers, wanted)
    assert {kept for answer in answers for kept in answer.accepted} > {1}
    statistic, freedom = chi_square(Counter(answer.token_ids[:2] for answer in answers), expected)  # type: ignore[arg-type]
    assert statistic < bound(freedom)
