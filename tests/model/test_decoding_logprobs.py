"""Log-probabilities of decided tokens: the same numbers as the confidences, for every token, only where asked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.engine.events import Canvas, Delta, Event, Finished
from actors.engine.loop import Engine
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from model.decoding import GenerationResult, Reveal
from model.decoding.sampling import Chosen
from tests.decoding import MASK, answer, make_request, prompt_of
from tests.oracles import logits_of

KINDS: list[dict[str, Any]] = [
    {},
    {"mode": "ar"},
    {"temperature": 1.0, "seed": 2},
    {"policy": "entropy", "gamma": 1.0},
    {"repetition_penalty": 1.3, "logit_bias": ((50, 3.0),)},
    {"refresh": "sub_block"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_carries_the_logarithm_of_its_confidence_and_the_most_likely_tokens(
    sharp_backbone: Backbone, kind: dict[str, Any]
) -> None:
    request = make_request("r", prompt_of(10), 37, logprobs=3, trace=True, **kind)
    engine, reveals, events = Engine(sharp_backbone), list[Reveal](), list[Event]()

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, Canvas):
            reveals.extend(event.reveals)

    engine.submit(request, listen)
    engine.run_until_idle()
    result = events[-1].result if isinstance(events[-1], Finished) else None
    assert result is not None and result.logprobs is not None
    assert len(result.logprobs) == result.completion_tokens
    for token, one in zip(result.token_ids, result.logprobs, strict=True):
        values = [value for _, value in one.top]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert all(value == one.logprob for top, value in one.top if top == token)
        assert one.logprob <= values[0]
        if "temperature" not in kind:
            assert one.top[0][0] == token or one.logprob == values[0]
    for reveal in reveals:
        assert reveal.logprob is not None
        assert math.exp(reveal.logprob.logprob) == pytest.approx(reveal.confidence, rel=1e-5)
        if reveal.position - 10 < len(result.logprobs):
            assert result.logprobs[reveal.position - 10] == reveal.logprob
    deltas = [event for event in events if isinstance(event, Delta)]
    assert all(delta.logprobs is not None and len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert tuple(one for delta in deltas for one in delta.logprobs or ()) == result.logprobs


def test_asking_changes_no_token_and_who_does_not_ask_gets_none(sharp_backbone: Backbone) -> None:
    for kind in KINDS:
        with_them = answer(sharp_backbone, make_request("r", prompt_of(10), 30, logprobs=5, **kind))
        without = answer(sharp_backbone, make_request("r", prompt_of(10), 30, **kind))
        assert without.logprobs is None
        assert replace(with_them, logprobs=None) == without


def test_a_request_alone_has_the_same_log_probabilities_in_a_batch(sharp_backbone: Backbone) -> None:
    requests = [
        make_request(str(i), prompt_of(5 + 3 * i), 20 + i, logprobs=n, **kind)
        for i, (kind, n) in enumerate(zip(KINDS, (0, 1, 20, 5, 2, None), strict=True))
    ]
    together: list[GenerationResult] = generate_all(Engine(sharp_backbone), requests)
    for request, result in zip(requests, together, strict=True):
        alone = answer(sharp_backbone, request)
        assert alone.token_ids == result.token_ids
        for a, b in zip(alone.logprobs or (), result.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
        widths = {len(one.top) for one in result.logprobs or ()}
        assert widths <= {request.logprobs}


def test_in_ar_mode_they_are_the_model_s_own_with_the_mask_token_and_in_blocks_without(
    sharp_backbone: Backbone,
) -> None:
    exact = load_backbone(sharp_backbone.name, dtype=torch.float64)
    prompt = prompt_of(9)
    result = answer(exact, make_request("r", prompt, 12, mode="ar", logprobs=20))
    ids = torch.tensor([*prompt, *result.token_ids])
    position = torch.arange(len(ids))
    with torch.no_grad():
        expected = logits_of(exact.model, ids, position, position[:, None] >= position[None]).log_softmax(-1)
    for i, one in enumerate(result.logprobs or ()):
        line = expected[len(prompt) - 1 + i]
        assert one.logprob == pytest.approx(float(line[result.token_ids[i]]), abs=1e-9)
        assert [token for token, _ in one.top] == line.topk(20).indices.tolist()
    blocks = answer(exact, make_request("r", prompt, 40, logprobs=20))
    assert all(token != MASK for one in blocks.logprobs or () for token, _ in one.top)


def test_nothing_is_computed_that_nobody_asks_for(sharp_backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("nobody asked")

    for name in ("top_logprobs", "entropy", "gap"):
        monkeypatch.setattr(Chosen, name, forbidden)
    assert answer(sharp_backbone, make_request("r", prompt_of(9), 20)).completion_tokens == 20
    with pytest.raises(AssertionError, match="nobody asked"):
        answer(sharp_backbone, make_request("r", prompt_of(9), 20, logprobs=0))
    with pytest.raises(AssertionError, match="nobody asked"):
        answer(sharp_backbone, make_request("r", prompt_of(9), 20, policy="prophet"))
