"""Decoding as the published reference does it, replayed by our decoder from the request alone.

The reference's rules need no second code path: a budget of whole blocks is a number of tokens (one more is appended
after the last commit), block heads are greedy at temperature 0, the threshold is strict in both. Only the mask token
must stay in the distributions, as the reference leaves it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.config import DecodeConfig
from model.decoding import Decoder, GenerationRequest, Phase, Reveal, Row, Turn
from tests.golden.kinds import golden_backbone

METHOD = "fast_dllm_v2"


@dataclass
class Block:
    """A working block as it was decoded."""

    start: int
    steps: list[tuple[Reveal, ...]] = field(default_factory=list)
    committed: bool = False


@dataclass
class Replayed:
    """One request decoded alone, with every forward counted."""

    row: Row
    forwards: dict[str, int]
    blocks: list[Block]

    @property
    def new_ids(self) -> list[int]:
        return list(self.row.result().token_ids)


def request(
    case: dict[str, Any], meta: dict[str, Any], prompt: list[int], budget: int, refresh: str = "always"
) -> GenerationRequest:
    stops = frozenset({meta["stop_token_id"]})
    decode = DecodeConfig(
        threshold=case["threshold"], sub_block_size=case["small_block_size"], refresh=refresh, fused="off"
    )
    return GenerationRequest("row", tuple(prompt), budget, decode=decode, stop_token_ids=stops)


def replay(decoder: Decoder, request: GenerationRequest) -> Replayed:
    row = decoder.make_row(request)
    done = Replayed(row, dict.fromkeys(("prefill", "denoise", "commit", "denoise_full", "denoise_partial"), 0), [])
    while row.phase is not Phase.DONE:
        phase, start = row.phase, row.committed
        turn = Turn(row, row.prefill_left)
        count = len(turn.query)
        (outcome,) = decoder.step([turn])
        assert outcome.error is None, outcome.error
        done.forwards[phase.value] += 1
        if phase is Phase.DENOISE:
            done.forwards["denoise_full" if count == row.block_size else "denoise_partial"] += 1
            if not done.blocks or done.blocks[-1].start != start:
                done.blocks.append(Block(start))
            done.blocks[-1].steps.append(outcome.reveals)
        elif phase is Phase.COMMIT:
            done.blocks[-1].committed = True
    decoder.release(row)
    return done


def check_alone(case: dict[str, Any], meta: dict[str, Any], folder: Path, refresh: str) -> None:
    """Ids, counts of forwards, blocks and, where recorded, every reveal of one prompt."""
    prompt, block_size = case["prompt_ids"], meta["block_size"]
    budget = case["max_new_tokens"] // block_size * block_size - len(prompt) % block_size + 1
    expected = case["output_ids"][len(prompt) :]
    if budget < 1:
        assert not expected, "a budget under one block gives nothing in the reference"
        return
    decoder = Decoder(golden_backbone(folder), rows=1, ban_mask_token=False)
    done = replay(decoder, request(case, meta, prompt, budget, refresh))
    assert done.new_ids == expected
    assert (done.row.finish_reason == "stop") == case["stopped"]
    assert done.forwards | {"total": case["forwards"]["total"]} == case["forwards"]
    assert sum(done.row.result().forwards.values()) == case["forwards"]["total"]
    blocks = [{"start": b.start, "denoise": len(b.steps), "committed": b.committed} for b in done.blocks]
    assert blocks == [b for b in case["blocks"] if b["denoise"] or b["committed"]]
    if "trace" in case:
        check_trace(done, [b for b in case["trace"] if b["steps"] or b["committed"]])


def check_trace(done: Replayed, trace: list[dict[str, Any]]) -> None:
    for block, recorded in zip(done.blocks, trace, strict=True):
        assert block.start == recorded["start"]
        opened = [[[r.position, r.token] for r in step] for step in block.steps]
        assert opened == [[reveal[:2] for reveal in step] for step in recorded["steps"]]
        confidences = [r.confidence for step in block.steps for r in step]
        assert confidences == pytest.approx([r[2] for step in recorded["steps"] for r in step], rel=1e-6)


def check_generate(case: dict[str, Any], meta: dict[str, Any], folder: Path) -> None:
    assert not case["use_block_cache"]
    check_alone(case, meta, folder, refresh="always")


def check_generate_block_cache(case: dict[str, Any], meta: dict[str, Any], folder: Path) -> None:
    assert case["use_block_cache"]
    check_alone(case, meta, folder, refresh="sub_block")


def check_batch_sample(case: dict[str, Any], meta: dict[str, Any], folder: Path) -> None:
    """All rows together in one engine, each at its own pace; the reference's budget is one of blocks for the batch."""
    block_size = meta["block_size"]
    longest = max(map(len, case["prompts"]))
    end = block_size * (case["max_new_tokens"] // block_size + longest // block_size) + 1
    requests = [
        GenerationRequest(**{**vars(request(case, meta, prompt, end - len(prompt))), "id": str(index)})
        for index, prompt in enumerate(case["prompts"])
    ]
    engine = Engine(golden_backbone(folder), EngineConfig(max_rows=len(requests)))
    engine.decoder.ban_mask_token = False
    results = generate_all(engine, requests)
    assert [[*p, *r.token_ids] for p, r in zip(case["prompts"], results, strict=True)] == case["output_ids_trimmed"]
    assert [r.finish_reason == "stop" for r in results] == case["stopped"]


KINDS = {
    "generate": check_generate,
    "generate_block_cache": check_generate_block_cache,
    "batch_sample": check_batch_sample,
}
