"""Decoding: blocks against one token at a time on the same weights, and what a longer query costs.

Two parts, each for one request at a time and for several:

    rounds     a round's time by query length (1, 2, 4 ... tokens a row) over the same cached prefix, through the
               engine's own decoder: packing, forward, head and choice. Over the time of one token this is the
               break-even: a block decoder must decide that many tokens a forward to be as fast as AR
    answers    whole answers of a fixed length through the engine: AR, and blocks under a fixed number of steps, so
               that tokens per forward are known and the weights do not matter; with an adapted model also
               threshold 0.9 on held-out tasks against its own AR mode, where they do
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from actors.protocol.card import model_card
from model.backbone import DTYPES, Backbone, load_backbone, make_block_diffusion
from model.config import DecodeConfig, default_sub_block
from model.decoding import Decoder, GenerationRequest, GenerationResult, Phase, Row, Turn
from model.errors import UserError
from pipelines.assessment.contenders import AR
from pipelines.assessment.questions import make_requests, task_questions
from pipelines.benches.result import BenchConfig, Result, device_name, machine, model_of
from pipelines.benches.timing import Times, take_turns

BLOCK_SIZE = 32  # of a model that was not adapted


class DecodeBenchConfig(BenchConfig):
    """Time block decoding against AR with the same weights, and a round by its query length."""

    output_name: ClassVar[str] = "bench/decode.json"

    batches: tuple[int, ...] = Field((1, 8), description="requests at a time, one part each")
    queries: tuple[int, ...] = Field((1, 2, 4, 8, 16, 32, 64), description="query tokens a row in a round")
    cached: int = Field(256, ge=1, description="tokens in the cache before, a multiple of every query length")
    rounds_each: int = Field(6, ge=1, description="rounds of the decoder in one measurement of a query length")
    steps: tuple[int, ...] | None = Field(
        None, description="denoising steps of a block, one block decoder each; null: half and a quarter of the block"
    )
    answer: int = Field(64, ge=1, description="tokens of an answer of fixed length")
    tasks: int = Field(8, ge=0, description="held-out tasks an adapted model answers")
    threshold: float = Field(0.9, gt=0, le=1, description="confidence threshold on those tasks")
    max_tokens: int = Field(96, ge=1, description="longest answer to a task in tokens")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("bfloat16", description="number format")


def run_decode(config: DecodeBenchConfig) -> Result:
    """Measure both parts."""
    check_queries(config)
    source, name = model_of(config)
    backbone = load_backbone(source, dtype=DTYPES[config.dtype], device=device_name())
    adapted = backbone.block_diffusion is not None
    if not adapted:
        backbone = make_block_diffusion(backbone, block_size=BLOCK_SIZE, trained_context_length=None)
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for batch in config.batches:
        parts = [measure_rounds, _measure_fixed, *([_measure_tasks] if adapted and config.tasks else [])]
        for part in parts:
            lines, found = part(backbone, batch, config)
            table += lines
            ratios |= found
    what = "adapted" if adapted else "not adapted: how fast, not how good"
    note = f"{name} ({what}), {config.cached} tokens in the cache or in a prompt of a fixed-length answer."
    return Result("decode", machine(config.dtype), config.rounds, table, ratios, note)


# ------------------------------------------------------------------------------------------------- rounds
def check_queries(config: DecodeBenchConfig) -> None:
    """Raises UserError unless the cache ends with a whole block of every query length."""
    for query in config.queries:
        if query < 1 or config.cached % query:
            raise UserError(f"--cached {config.cached} is not a multiple of the query length {query}.")


def measure_rounds(
    backbone: Backbone, batch: int, config: DecodeBenchConfig
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A round's time for each query length, and the break-even tokens per forward."""
    runs = {query: RunningRows(backbone, query, batch, config) for query in config.queries}
    forms = {str(query): run.rounds for query, run in runs.items()}
    times = take_turns(forms, config.rounds, title=f"decode: batch {batch}, rounds")
    one = str(min(config.queries))
    lines = [
        {
            "part": "round",
            "batch": batch,
            "decoder": "1 token" if query == 1 else f"{query} tokens",
            "round ms": 1000 * times.median(str(query)) / config.rounds_each,
            "break-even": times.ratio(str(query), one),
        }
        for query in config.queries
    ]
    named = [query for query in config.queries if str(query) != one]
    ratios = {
        f"break-even tokens per forward, {q}-token rounds, batch {batch}": times.ratio(str(q), one) for q in named
    }
    return lines, ratios


class RunningRows:
    """`batch` rows that decode blocks of `query` tokens over `cached` prompt tokens; query 1 decodes AR."""

    def __init__(
        self, backbone: Backbone, query: int, batch: int, config: DecodeBenchConfig, *, weights: str = "model"
    ) -> None:
        self.each = config.rounds_each
        decided = config.rounds_each * (config.rounds + 1)  # one token a round, the warm-up round included
        length = config.cached + (-(-decided // query) + 2) * query
        adapted = backbone.block_diffusion
        assert adapted is not None, "run_decode makes it one"
        sized = replace(adapted, block_size=query, sub_block_size=default_sub_block(query))
        self._decoder = Decoder(
            replace(backbone, block_diffusion=sized), rows=batch, max_length=length, weights=weights
        )
        decode = AR if query == 1 else DecodeConfig(policy="sequential")
        prompts = _prompts(backbone, batch, config.cached, config.seed)
        self._rows = [self._admit(f"{i}", ids, length - config.cached, decode) for i, ids in enumerate(prompts)]
        while any(row.phase is Phase.PREFILL for row in self._rows):
            self._decoder.step([Turn(row, row.prefill_left) for row in self._rows])

    def _admit(self, name: str, ids: tuple[int, ...], max_tokens: int, decode: DecodeConfig) -> Row:
        request = GenerationRequest(name, ids, max_tokens, decode=decode)
        self._decoder.check(request)
        return self._decoder.make_row(request)

    def rounds(self) -> None:
        """`each` rounds of all rows."""
        for _ in range(self.each):
            self._decoder.step([Turn(row) for row in self._rows])


def _prompts(backbone: Backbone, count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Random ids."""
    vocabulary = backbone.model.get_input_embeddings().num_embeddings
    drawn = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))
    return [tuple(ids) for ids in drawn.tolist()]


# ------------------------------------------------------------------------------------------------- answers
@dataclass
class Answering:
    """Requests through an engine, and what came of them."""

    engine: Engine
    requests: Sequence[GenerationRequest]
    results: Sequence[GenerationResult] = ()

    def run(self) -> None:
        self.results = generate_all(self.engine, self.requests)

    @property
    def tokens(self) -> int:
        return sum(result.completion_tokens for result in self.results)

    @property
    def tokens_per_forward(self) -> float:
        forwards = sum(result.forwards["denoise"] + result.forwards["commit"] for result in self.results)
        return self.tokens / max(1, forwards)


def _measure_fixed(
    backbone: Backbone, batch: int, config: DecodeBenchConfig
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Answers of a fixed length: no stop token, a fixed number of steps a block."""
    prompts = _prompts(backbone, batch, config.cached, config.seed)
    assert backbone.block_diffusion is not None, "run_decode makes it one"
    size = backbone.block_diffusion.block_size
    steps = config.steps or sorted({max(1, size // 2), max(1, size // 4)}, reverse=True)
    decoders = {"AR": AR, **{f"blocks, {n} steps": DecodeConfig(policy="static", steps=n) for n in steps}}
    engine = Engine(
        backbone, EngineConfig(batch, min(config.cached + config.answer, backbone.context_length), prefix_cache=False)
    )
    runs = {
        name: Answering(
            engine,
            [GenerationRequest(str(i), ids, config.answer, decode=decode) for i, ids in enumerate(prompts)],
        )
        for name, decode in decoders.items()
    }
    return _compare("fixed length", runs, batch, config)


def _measure_tasks(
    backbone: Backbone, batch: int, config: DecodeBenchConfig
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Held-out tasks, each answer as long as the decoder makes it."""
    questions = task_questions(max(batch, config.tasks), 0, config.max_tokens)
    decoders = {"AR": AR, f"blocks, threshold {config.threshold:g}": DecodeConfig(threshold=config.threshold)}
    card = model_card(backbone)
    asked = {name: make_requests(questions, card, decode, config.seed) for name, decode in decoders.items()}
    longest = max(len(request.prompt_ids) + request.max_tokens for requests in asked.values() for request in requests)
    engine = Engine(backbone, EngineConfig(batch, min(longest, backbone.context_length), prefix_cache=False))
    return _compare("tasks", {name: Answering(engine, requests) for name, requests in asked.items()}, batch, config)


def _compare(
    part: str, runs: dict[str, Answering], batch: int, config: DecodeBenchConfig
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Tokens/s of each decoder, and over AR's."""
    forms: dict[str, Callable[[], None]] = {name: partial(Answering.run, run) for name, run in runs.items()}
    times = take_turns(forms, config.rounds, title=f"decode: batch {batch}, {part}")
    lines = [
        {
            "part": part,
            "batch": batch,
            "decoder": name,
            "tokens": run.tokens,
            "tokens/s": run.tokens / times.median(name),
            "per forward": run.tokens_per_forward,
            "over AR": _over_ar(name, runs, times),
        }
        for name, run in runs.items()
    ]
    ratios = {f"{name} over AR, {part}, batch {batch}": _over_ar(name, runs, times) for name in runs if name != "AR"}
    return lines, ratios


def _over_ar(name: str, runs: dict[str, Answering], times: Times) -> float:
    """Tokens/s over those of AR: the answers may differ in length."""
    return times.ratio("AR", name) * runs[name].tokens / runs["AR"].tokens
