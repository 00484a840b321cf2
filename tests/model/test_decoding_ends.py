"""How rows end, whatever the policy: at the first of many stops, after one token, and on logits that are no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.engine.events import Event, Failed, Finished
from actors.engine.loop import Engine
from actors.engine.together import generate_all
from model.backbone import Backbone
from model.decoding import POLICIES
from tests.decoding import make_request, prompt_of
from tests.scripted import BLOCK, scripted_backbone
from tests.tiny import VOCAB_SIZE

KINDS: list[dict[str, Any]] = [
    *({"policy": name} for name in sorted(POLICIES)),
    {"mode": "ar"},
    {"refresh": "sub_block"},
    {"temperature": 1.0, "min_p": 0.1, "top_p": 0.9},
    {"temperature": 1.0, "seed": 1},
    {"repetition_penalty": 1.2, "presence_penalty": 1.0, "logit_bias": ((30, 5.0),), "logprobs": 2},
]
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)
BAD_FROM = 200  # scripted: positions from here on have bad logits


def script(position: int) -> tuple[int, float]:
    """Easy and hard positions in turn."""
    return 20 + position % 200, 0.95 if position % 3 else 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_stops_ends_at_the_first_token(kind: dict[str, Any]) -> None:
    requests = [make_request(str(n), prompt_of(n), 20, stop=range(VOCAB_SIZE), **kind) for n in LENGTHS]
    for result in generate_all(Engine(scripted_backbone(script)), requests):
        assert (result.completion_tokens, result.text, result.finish_reason) == (1, "", "stop")
        assert result.logprobs is None or len(result.logprobs) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_of_one_token_gives_the_first_of_a_larger_one(kind: dict[str, Any]) -> None:
    engine = Engine(scripted_backbone(script))
    one = generate_all(engine, [make_request(str(n), prompt_of(n), 1, **kind) for n in LENGTHS])
    more = generate_all(engine, [make_request(str(n), prompt_of(n), 2 * BLOCK, **kind) for n in LENGTHS])
    for first, whole in zip(one, more, strict=True):
        assert first.token_ids == whole.token_ids[:1] and first.finish_reason == "length"
        assert whole.completion_tokens == 2 * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_behind_a_masked_slot_waits_until_nothing_is_masked_before_it(kind: dict[str, Any]) -> None:
    """Every position that is easy is a stop, so blocks hold decided stops behind masked slots; the first one counts."""
    engine = Engine(scripted_backbone(script))
    for length in LENGTHS:
        request = make_request("r", prompt_of(length), 30, stop=[20 + p for p in range(200) if p % 3], **kind)
        (result,) = generate_all(engine, [request])
        stops = [token in request.stop_token_ids for token in result.token_ids]
        assert result.finish_reason == "stop" and stops.index(True) == len(stops) - 1


def bad_backbone(value: float) -> Backbone:
    """Logits that hold `value` from BAD_FROM on: everywhere if it is -inf, else at one token."""
    backbone = scripted_backbone(script)
    model: Any = backbone.model
    if value == -torch.inf:
        model.logits[BAD_FROM:] = value
    else:
        model.logits[BAD_FROM:, 7] = value
    return backbone


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_logits_fail_their_request_and_leave_others_of_its_kind_alone(kind: dict[str, Any], value: float) -> None:
    good = [make_request(f"good{n}", prompt_of(n), 30, **kind) for n in LENGTHS]
    expected = generate_all(Engine(scripted_backbone(script)), good)
    engine, ended = Engine(bad_backbone(value)), dict[str, Event]()

    def listen(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ended[event.id] = event

    bad = [make_request(f"bad{n}", prompt_of(n), 30, **kind) for n in (BAD_FROM - 2, BAD_FROM, BAD_FROM + 3)]
    for pair in zip([*bad, *bad[:2]], good, strict=True):
        for request in pair:
            if request.id not in ended:
                engine.submit(request, listen)
        engine.run_until_idle()
    for request in bad:
        failed = ended[request.id]
        assert isinstance(failed, Failed) and "logits are not finite" in failed.message
    assert [ended[r.id].result for r in good if isinstance(ended[r.id], Finished)] == expected  # type: ignore[union-attr]
    assert engine.stats().pages_used == 0
