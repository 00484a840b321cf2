"""Lossless mode: AR mode's answer, whatever is drafted; with a temperature AR mode's distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import model.decoding.decoder as decoder_module
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone
from model.config import BlockDiffusionConfig, DecodeConfig
from model.decoding import GenerationRequest, GenerationResult
from model.decoding.acceptance import accept
from model.decoding.lossless import Draft
from model.decoding.row import Query
from model.errors import UserError
from tests.decoding import BLOCK, answer, make_request, prompt_of, renamed
from tests.scripted import scripted_backbone
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

AR = DecodeConfig(mode="ar")
PROMPT = prompt_of(13)


def lossless(request: GenerationRequest, fused: str = "speculative") -> GenerationRequest:
    return replace(request, decode=DecodeConfig(mode="lossless", fused=fused))


def same_answer(one: GenerationResult, other: GenerationResult) -> bool:
    return all(
        getattr(one, name) == getattr(other, name) for name in ("token_ids", "text", "finish_reason", "prompt_tokens")
    )


def draft_what(monkeypatch: pytest.MonkeyPatch, written: Callable[[int], int]) -> None:
    """Every draft proposes written(position)."""

    def forged(query: Query, *_: Any) -> Draft:
        return Draft(np.array([written(p) for p in range(query.keep + 1, query.keep + 1 + query.drafts)], dtype=int))

    monkeypatch.setattr(decoder_module, "_draft", forged)


def right_with(share: float, tokens: tuple[int, ...], start: int) -> Callable[[int], int]:
    """The answer's own tokens, each wrong with probability 1 - share; anything behind its end."""
    wrong = np.random.default_rng(int(share * 100)).random(start + len(tokens) + 64) >= share

    def written(position: int) -> int:
        if not start <= position < start + len(tokens):
            return 11
        return (tokens[position - start] + int(wrong[position])) % VOCAB_SIZE

    return written


# ------------------------------------------------------------------------------------------------- greedy
@pytest.mark.parametrize("fused", ["off", "speculative"])
@pytest.mark.parametrize("share", [None, 0.0, 0.5, 0.9, 1.0])
def test_the_answer_is_ar_mode_s_whatever_is_drafted(
    sharp_backbone: Backbone, share: float | None, fused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in (1, BLOCK - 1, BLOCK, 21):
        request = make_request("r", prompt_of(length), 45, mode="ar")
        expected = answer(sharp_backbone, request)
        with monkeypatch.context() as patch:
            if share is not None:
                draft_what(patch, right_with(share, expected.token_ids, length))
            result = answer(sharp_backbone, lossless(request, fused))
        assert same_answer(result, expected)
        if share == 1.0:
            assert result.accepted_tokens == result.drafted_tokens > 25
            assert result.tokens_per_forward > (4 if fused == "speculative" else 2.5)
        if share == 0.0:
            assert result.accepted_tokens == 0


@pytest.mark.parametrize("share", [0.8, 1.0])
def test_stops_inside_drafts_and_max_tokens_end_the_answer_where_ar_mode_ends(
    sharp_backbone: Backbone, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answer(sharp_backbone, make_request("r", PROMPT, 30, mode="ar"))
    draft_what(monkeypatch, right_with(share, plain.token_ids, len(PROMPT)))
    engine = Engine(sharp_backbone)
    asked = [make_request(f"length {n}", PROMPT, n, mode="ar") for n in range(1, 14)]
    asked += [make_request(f"stop {t}", PROMPT, 30, mode="ar", stop=[t]) for t in sorted(set(plain.token_ids[1:9]))]
    strings = [plain.text[i : i + 2] for i in range(1, 7)]
    asked += [make_request(f"string {s}", PROMPT, 30, mode="ar", stop_strings=(s,)) for s in sorted(set(strings))]
    for request in asked:
        expected, result = (generate_all(engine, [one])[0] for one in (request, lossless(request)))
        assert same_answer(result, expected), request.id
        assert len(result.token_ids) <= request.max_tokens
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize(
    "kind",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"logit_bias": ((40, 6.0), (41, 5.5), (60, -100.0)), "frequency_penalty": 1.0},
        {"logit_bias": ((50, 3.0),), "logprobs": 3},
        {"logprobs": 2, "repetition_penalty": 0.8},
    ],
)
def test_penalties_biases_and_logprobs_are_ar_mode_s(
    sharp_backbone: Backbone, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("r", PROMPT, 30, mode="ar", **kind)
    expected = answer(sharp_backbone, request)
    draft_what(monkeypatch, right_with(0.8, expected.token_ids, len(PROMPT)))
    result = answer(sharp_backbone, lossless(request))
    assert same_answer(result, expected) and result.accepted_tokens > 10
    assert result.logprobs == expected.logprobs


# ------------------------------------------------------------------------------------------------- pages
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_rejected_drafts_leave_nothing_in_the_prefix_cache_that_ar_mode_shares(
    sharp_backbone: Backbone, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("ar", PROMPT, 40, mode="ar")
    expected = answer(sharp_backbone, request)
    draft_what(monkeypatch, right_with(share, expected.token_ids, len(PROMPT)))
    engine = Engine(sharp_backbone)
    (first,) = generate_all(engine, [renamed(lossless(request), "first")])
    following = make_request("next", (*PROMPT, *first.token_ids, *prompt_of(5)), 20, mode="ar")
    (found,) = generate_all(engine, [following])
    assert found.cached_tokens >= 48, "what lossless mode committed is found by AR mode"
    assert found.token_ids == answer(sharp_backbone, following).token_ids
    (again,) = generate_all(engine, [renamed(lossless(request), "again")])
    assert again.cached_tokens == BLOCK and again.token_ids == expected.token_ids


def test_a_draft_grows_while_it_stands_and_shrinks_when_it_does_not(
    sharp_backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    plain = decoder_module._apply_lossless

    def noting(row: Any, query: Query, *rest: Any) -> Any:
        if query.drafted:
            lengths.append(query.drafted)
        return plain(row, query, *rest)

    monkeypatch.setattr(decoder_module, "_apply_lossless", noting)
    right = scripted_backbone(lambda p: (20 + p % 200, 0.9))
    assert answer(right, make_request("r", PROMPT, 60, mode="lossless", fused="speculative")).tokens_per_forward > 5
    assert lengths[:5] == [4, 4, 6, 7, 7] and max(lengths) == BLOCK - 1, "each is as long as what stood before it grew"
    lengths.clear()
    draft_what(monkeypatch, lambda position: 5)
    assert answer(right, make_request("r", PROMPT, 12, mode="lossless", fused="speculative")).accepted_tokens == 0
    assert lengths[0] == 4 and set(lengths[1:]) == {1}


def test_a_model_that_was_not_adapted_cannot_draft(tiny_model: Any) -> None:
    from model.backbone import load_backbone

    with pytest.raises(UserError, match='mode "lossless" needs a model adapted to write blocks'):
        answer(load_backbone(tiny_model), make_request("r", PROMPT, 5, mode="lossless"))


# ------------------------------------------------------------------------------------------------- with a temperature
SMALL, SMALL_MASK = 6, 3


class BigramModel(nn.Module):
    """Logits that depend on the token before alone: AR mode is a Markov chain, and behind a mask all is different."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SMALL, 1)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=1))
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.table = torch.randn((SMALL, SMALL), generator=torch.Generator().manual_seed(3)) * 1.5
        self.table[:, 3:] -= 30.0  # three tokens are left: four of them in a row are 81 answers

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, *, input_ids: Tensor, logits_to_keep: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids[0, logits_to_keep]][None])


def bigram_backbone() -> Backbone:
    model: Any = BigramModel()
    return Backbone(
        model=model,
        tokenizer=tiny_tokenizer(),
        block_diffusion=BlockDiffusionConfig(8, SMALL_MASK, sub_block_size=4),
        name="bigram",
        revision="0",
        context_length=64,
        stop_token_ids=frozenset(),
    )


def chi_square(seen: Tensor, expected: Tensor) -> float:
    """Probability of counts [n] at least so far from the expected ones, where those are right."""
    expected = expected / expected.sum() * seen.sum()
    distance = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), distance / 2))


def chain(table: Tensor, first: int, length: int, temperature: float) -> Tensor:
    """Probabilities of every answer of `length` tokens behind `first`, float64 [SMALL] * length."""
    step = (table.double() / temperature).softmax(-1)
    joint = step[first]
    for _ in range(length - 1):
        joint = joint[..., None] * step
    return joint


@pytest.mark.parametrize(
    "kind", [{"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.999999, "fused": "speculative"}], ids=str
)
def test_drawn_answers_are_distributed_as_ar_mode_s(kind: dict[str, Any]) -> None:
    """Chi-square of all answers of four tokens against their exact probabilities."""
    backbone, count = bigram_backbone(), 3000
    requests = [make_request(f"{i}", (1, 2), 5, mode="lossless", seed=i, **kind) for i in range(count)]
    results = generate_all(Engine(backbone, EngineConfig(max_rows=250, max_length=16)), requests)
    drafted = sum(r.drafted_tokens for r in results)
    assert 0.2 * drafted < sum(r.accepted_tokens for r in results) < 0.9 * drafted, "both must happen"
    expected = chain(backbone.model.table, 2, 5, kind["temperature"])[:3, :3, :3, :3, :3].sum(0).flatten() * count  # type: ignore[index]
    seen = torch.zeros(81, dtype=torch.float64)
    for result in results:
        _, *rest = result.token_ids
        seen[np.ravel_multi_index(rest, (3, 3, 3, 3))] += 1
    common = expected >= 5
    seen, expected = (torch.cat([one[common], one[~common].sum()[None]]) for one in (seen, expected))
    assert chi_square(seen, expected) > 1e-3


def test_the_acceptance_rule_turns_draws_from_q_into_draws_from_p() -> None:
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.rand((7, 9), generator=generator).pow(3) for _ in range(2))
    p[:, 2], q[:, 4] = 0.0, 0.0  # one never drafted for nothing, one that only a replacement can bring
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    count = 40_000
    for line in range(len(p)):
        token = torch.multinomial(q[line], count, replacement=True, generator=generator)
        chance, point = (torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))
        stands, final = accept(p[line].expand(count, -1), q[line].expand(count, -1), token, chance, point)
        assert bool((final[stands] == token[stands]).all()) and not bool((final[~stands] == token[~stands]).any())
        assert float(stands.double().mean()) == pytest.approx(float(torch.minimum(p[line], q[line]).sum()), abs=0.01)
        seen = torch.bincount(final, minlength=9)
        assert seen[2] == 0
        expected = p[line].double() / p[line].double().sum() * count
        others = [i for i in range(9) if i != 2]
        assert chi_square(seen[others], expected[others]) > 1e-4


def test_a_drawn_answer_that_another_engine_began_keeps_what_is_known(sharp_backbone: Backbone) -> None:
    request = make_request("r", PROMPT, 20, mode="lossless", temperature=1.0, seed=4)
    whole = answer(sharp_backbone, request)
    for known in (1, 2, 7, 19, 20):
        result = answer(sharp_backbone, replace(request, answered=whole.token_ids[:known]))
        assert result.token_ids[:known] == whole.token_ids[:known] and result.completion_tokens == 20
