"""Penalties and biases through the whole decoder: what counts as text, against transformers, against an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engine.events import Canvas, Event
from actors.engine.loop import Engine
from model.backbone import Backbone, load_backbone
from model.decoding import Decoder, GenerationRequest
from model.decoding.packing import Turn, pack
from model.decoding.penalties import edits_of
from model.decoding.row import DECIDED
from model.errors import UserError
from tests.decoding import BLOCK, MASK, answer, make_request, naive_decode, prompt_of
from tests.scripted import scripted_backbone

KINDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.7},
    {"frequency_penalty": 0.9},
    {"presence_penalty": -1.0, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"logit_bias": ((40, 6.0), (41, 5.0), (60, -100.0)), "frequency_penalty": 2.0},
]


# ------------------------------------------------------------------------------------------------- against others
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_with_penalties_equal_the_decoder_that_counts_literally(sharp_backbone: Backbone, kind: Any) -> None:
    exact = load_backbone(sharp_backbone.name, dtype=torch.float64)
    plain = answer(exact, make_request("r", prompt_of(13), 30)).token_ids
    for policy in ({}, {"policy": "sequential"}, {"sub_block_size": 8, "threshold": 0.2}):
        request = make_request("r", prompt_of(13), 30, **kind, **policy)
        result = answer(exact, request)
        assert (result.token_ids, result.steps_per_block) == naive_decode(exact, request)
    assert answer(exact, make_request("r", prompt_of(13), 30, **kind)).token_ids != plain, "the penalty does something"


@pytest.mark.parametrize("penalty", [0.8, 1.3, 2.5])
def test_ar_mode_with_a_repetition_penalty_equals_generate_of_transformers(
    sharp_backbone: Backbone, penalty: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(sharp_backbone.name, dtype=torch.float32).eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 40}
    for length in (1, 5, 19):
        prompt = prompt_of(length)
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=penalty, **options)
        request = make_request("r", prompt, 40, mode="ar", repetition_penalty=penalty)
        assert answer(sharp_backbone, request).token_ids == tuple(out[0, length:].tolist())


# ------------------------------------------------------------------------------------------------- what counts
def changes(request: GenerationRequest, decided: dict[int, int]) -> dict[int, tuple[float, float]]:
    """{token: (repetition, shift)} of a row whose prompt is prefilled and that has decided {position: token}."""
    decoder = Decoder(scripted_backbone(lambda position: (20, 0.5)), rows=1)
    row = decoder.make_row(request)
    for position, token in decided.items():
        row.tokens[position], row.state[position] = token, DECIDED
    row.frontier = int(np.argmax(row.state != DECIDED))
    turn = Turn(row, row.prefill_left)
    decoder.supply(turn)
    slots = pack([turn], decoder.cache).slots
    edits = edits_of([turn], slots, torch.device("cpu"))
    if edits is None:
        return {}
    each = zip(edits.token.tolist(), zip(edits.repetition.tolist(), edits.shift.tolist(), strict=True), strict=True)
    found = list(each)
    assert found == found[: len(found) // len(slots.turn)] * len(slots.turn), "every slot of the row gets the same"
    return dict(found)


def test_repetition_counts_prompt_and_answer_and_the_other_penalties_the_answer() -> None:
    """Prompt 5 5 7, then 7 9 9 with a masked slot between them: further right counts too."""
    asked: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    request = make_request("r", (5, 5, 7), 20, **asked)
    assert changes(request, {3: 7, 5: 9, 6: 9}) == {5: (2.0, 0.0), 7: (2.0, -0.75), 9: (2.0, -1.0)}


def test_a_bias_adds_to_what_the_text_does() -> None:
    request = make_request("r", (5, 7), 20, frequency_penalty=1.0, logit_bias=((7, 3.0), (30, -100.0)))
    assert changes(request, {2: 7, 3: 7}) == {5: (1.0, 0.0), 7: (1.0, 1.0), 30: (1.0, -100.0)}
    assert changes(make_request("r", (5, 7), 20, logit_bias=((30, 2.0),)), {2: 7}) == {30: (1.0, 2.0)}


def test_who_asks_for_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes(make_request("r", (5, 7), 20), {2: 7}) == {}
    monkeypatch.setattr("model.decoding.penalties._row_edits", None)
    for kind in ({}, {"mode": "ar"}, {"temperature": 1.0, "min_p": 0.1}):
        assert answer(scripted_backbone(lambda p: (20 + p % 200, 0.9)), make_request("r", (5, 7), 20, **kind))


def test_neighbours_do_not_share_their_penalties() -> None:
    decoder = Decoder(scripted_backbone(lambda position: (20, 0.5)), rows=3)
    kinds: list[dict[str, Any]] = [{"repetition_penalty": 2.0}, {}, {"logit_bias": ((9, 1.0),)}]
    turns = [Turn(decoder.make_row(make_request(str(i), (5 + i,), 20, **kind))) for i, kind in enumerate(kinds)]
    for turn in turns:
        decoder.supply(turn)
    slots = pack(turns, decoder.cache).slots
    edits = edits_of(turns, slots, torch.device("cpu"))
    assert edits is not None
    turn = slots.turn[edits.slot.numpy()]
    assert set(zip(turn.tolist(), edits.token.tolist(), strict=True)) == {(0, 5), (2, 9)}
    assert len(np.unique(edits.slot.numpy())) == np.isin(slots.turn, (0, 2)).sum()


# ------------------------------------------------------------------------------------------------- what it does
@pytest.mark.parametrize("kind", [{}, {"mode": "ar"}, {"temperature": 1.5, "seed": 4}])
def test_a_token_biased_out_never_shows_and_one_biased_in_is_all_there_is(
    sharp_backbone: Backbone, kind: dict[str, Any]
) -> None:
    plain = answer(sharp_backbone, make_request("r", prompt_of(9), 30, **kind)).token_ids
    out = tuple((token, -100.0) for token in sorted(set(plain)))
    assert not set(plain) & set(
        answer(sharp_backbone, make_request("r", prompt_of(9), 30, logit_bias=out, **kind)).token_ids
    )
    only = answer(sharp_backbone, make_request("r", prompt_of(9), 30, logit_bias=((77, 100.0),), **kind))
    assert set(only.token_ids) == {77}


def test_a_bias_counts_in_the_confidence_that_opens_slots(sharp_backbone: Backbone) -> None:
    """A token that is certain after its bias opens a sub-block in one step."""
    seen: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Canvas):
            seen.extend(reveal.confidence for reveal in event.reveals)

    engine = Engine(sharp_backbone)
    engine.submit(
        make_request("r", prompt_of(BLOCK), 2 * BLOCK, threshold=0.99, logit_bias=((77, 100.0),), trace=True), listen
    )
    engine.run_until_idle()
    assert len(seen) == 2 * BLOCK and min(seen) > 0.99
    result = answer(
        sharp_backbone, make_request("r", prompt_of(BLOCK), 2 * BLOCK, threshold=0.99, logit_bias=((77, 100.0),))
    )
    assert result.steps_per_block == [2, 2]


def test_the_mask_token_stays_out_of_blocks_whatever_its_bias(sharp_backbone: Backbone) -> None:
    request = make_request("r", prompt_of(9), 20, logit_bias=((MASK, 100.0),))
    assert (
        answer(sharp_backbone, request).token_ids
        == answer(sharp_backbone, make_request("r", prompt_of(9), 20)).token_ids
    )


# ------------------------------------------------------------------------------------------------- bounds
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_p": 1.1}, "min_p must be 0 to 1, not 1.1"),
        ({"min_p": float("nan")}, "min_p must be 0 to 1, not nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0 and finite, not 0.0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be -2 to 2, not 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be -2 to 2, not nan"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5 must be -100 to 100, not 101.0"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias must not name a token twice"),
        ({"logprobs": 21}, "logprobs must be 0 to 20, not 21"),
        ({"logprobs": -1}, "logprobs must be 0 to 20, not -1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_field_value_and_rule(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_request("r", (11,), 5, **fields)


def test_a_bias_outside_the_vocabulary_is_refused_before_it_runs(sharp_backbone: Backbone) -> None:
    for token in (267, -1):
        with pytest.raises(UserError, match=f"logit_bias names the token id {token}, outside the vocabulary of 267"):
            answer(sharp_backbone, make_request("r", (11,), 5, logit_bias=((token, 1.0),)))


@pytest.mark.parametrize("penalty", [5e-324, 1e-38, 1e38, 1.7e308])
def test_no_penalty_is_so_extreme_that_an_answer_fails(sharp_backbone: Backbone, penalty: float) -> None:
    for fields in ({}, {"temperature": 1.0}, {"mode": "ar"}, {"policy": "entropy"}):
        request = make_request("r", prompt_of(13), 20, repetition_penalty=penalty, logprobs=2, **fields)
        result = answer(sharp_backbone, request)
        assert len(result.token_ids) == 20 and result.logprobs is not None
        assert all(np.isfinite(one.logprob) for one in result.logprobs)
