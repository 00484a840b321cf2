"""A commit and the next block's first step in one forward: what it must equal, and what it must save."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.backbone import Backbone, load_backbone
from model.decoding import Decoder, GenerationRequest, GenerationResult, Phase, Turn
from tests.decoding import BLOCK, EDGES, answer, make_request, naive_decode, prompt_of
from tests.scripted import scripted_backbone


@pytest.fixture(scope="module")
def exact_backbone(sharp_backbone: Backbone) -> Backbone:
    return load_backbone(sharp_backbone.name, dtype=torch.float64)


def forwards(result: GenerationResult) -> int:
    return result.forwards["denoise"] + result.forwards["commit"]


@pytest.mark.parametrize("policy", ["threshold", "sequential"])
@pytest.mark.parametrize("length", EDGES)
def test_masked_head_equals_its_oracle(exact_backbone: Backbone, length: int, policy: str) -> None:
    """The oracle commits in a forward of its own, and hides the first token from the step that follows."""
    for max_tokens in (1, 2, BLOCK, 4 * BLOCK + 3):
        request = make_request("r", prompt_of(length), max_tokens, policy=policy, fused="masked_head")
        result = answer(exact_backbone, request)
        expected, steps = naive_decode(exact_backbone, request, masked_head=True)
        assert result.token_ids == expected
        assert result.steps_per_block == steps


def test_the_hidden_first_token_matters(exact_backbone: Backbone) -> None:
    """Else the test above could not tell the two forms apart."""
    plain, hidden = (
        [answer(exact_backbone, make_request("r", prompt_of(n), 40, fused=fused)).steps_per_block for n in EDGES]
        for fused in ("off", "masked_head")
    )
    assert plain != hidden


KINDS: list[dict[str, Any]] = [
    {},
    {"policy": "sequential"},
    {"policy": "static", "steps": 2},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.3, "top_p": 0.8, "seed": 5},
    {"refresh": "sub_block"},
    {"refresh": "every:2"},
    {"sub_block_size": 1},
    {"sub_block_size": 8},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_speculative_equals_the_published_form_with_as_many_forwards_at_most(
    sharp_backbone: Backbone, kind: dict[str, Any], length: int
) -> None:
    off, fused = (
        answer(sharp_backbone, make_request("r", prompt_of(length), 60, fused=form, **kind))
        for form in ("off", "speculative")
    )
    assert fused.token_ids == off.token_ids and fused.text == off.text
    assert fused.steps_per_block == off.steps_per_block
    assert forwards(fused) <= forwards(off)
    assert fused.forwards["denoise"] == off.forwards["denoise"]


def test_wrong_guesses_are_dropped_and_right_ones_kept(sharp_backbone: Backbone) -> None:
    results = [answer(sharp_backbone, make_request("r", prompt_of(n), 60, fused="speculative")) for n in range(1, 30)]
    wrong = sum(result.forwards["commit"] for result in results)
    blocks = sum(len(result.steps_per_block) for result in results)
    assert 0 < wrong < blocks, "some guesses were wrong, some right: both ways were walked"


@pytest.mark.parametrize("fused", ["masked_head", "speculative"])
def test_a_block_costs_one_forward_less(fused: str) -> None:
    """With a model whose guess is always right. The prompt's last chunk is fused too where it can be."""
    backbone = scripted_backbone(lambda p: (20 + p % 200, 0.1))
    length = BLOCK + 3
    off, saved = (
        answer(backbone, make_request("r", prompt_of(length), 4 * BLOCK, policy="sequential", fused=form))
        for form in ("off", fused)
    )
    assert off.token_ids == saved.token_ids
    assert off.forwards == {"prefill": 1, "denoise": 5 + 3 * (BLOCK - 1) + 2, "commit": 4}
    assert saved.forwards["commit"] == 0 and saved.forwards["prefill"] == 0
    assert saved.forwards["denoise"] == off.forwards["denoise"]
    assert sum(saved.forwards.values()) == sum(off.forwards.values()) - off.forwards["commit"] - 1


def test_a_fused_query_holds_the_clean_block_and_the_next_canvas(sharp_backbone: Backbone) -> None:
    decoder = Decoder(sharp_backbone, rows=1)
    mask = decoder.mask_token_id
    request = make_request("r", prompt_of(2 * BLOCK), 3 * BLOCK, fused="masked_head")
    row = decoder.make_row(request)
    seen = 0
    while row.phase is not Phase.DONE:
        turn = Turn(row, row.prefill_left)
        query = turn.query
        if query.keep > query.start and query.end > query.keep:
            seen += 1
            assert (query.ids[: query.keep - query.start] != mask).all()
            assert (query.ids[query.keep - query.start :] == mask).all()
            assert query.candidates[0] == query.keep + 1, "the first slot is not the policy's to open"
        decoder.step([turn])
    assert seen == 3


def test_a_stop_at_a_block_s_head_ends_the_row_and_drops_the_step(sharp_backbone: Backbone) -> None:
    for fused in ("masked_head", "speculative"):
        whole = answer(sharp_backbone, make_request("r", prompt_of(BLOCK), 4 * BLOCK, fused=fused))
        head = whole.token_ids[BLOCK]
        assert head not in whole.token_ids[:BLOCK], "the model repeats itself: choose another prompt"
        stopped = answer(sharp_backbone, make_request("r", prompt_of(BLOCK), 4 * BLOCK, fused=fused, stop=[head]))
        assert stopped.token_ids == whole.token_ids[: BLOCK + 1]
        assert stopped.finish_reason == "stop"


def test_ar_mode_has_nothing_to_fuse(sharp_backbone: Backbone) -> None:
    def request(fused: str) -> GenerationRequest:
        return make_request("r", prompt_of(9), 12, mode="ar", fused=fused)

    assert answer(sharp_backbone, request("speculative")) == answer(sharp_backbone, request("off"))
