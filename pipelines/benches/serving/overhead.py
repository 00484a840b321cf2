"""Through HTTP against the engine called directly, and the gateway alone; behind Serve's proxy and behind HAProxy.

streams    the same questions, so many at a time, streamed: tokens/s and TTFT of the engine in this process and of a
           service with one replica of the same shape, in turns; both must write the same text. Beside TTFT, which is
           of a sub-block: when the whole first block was there, as streaming by blocks would have it
gateway    requests/s of the whole path in front of an engine that has nothing to do
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from pydantic import Field

from actors.engine.events import Delta, Event, Failed, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.gateway.access import KEYS_VARIABLE
from actors.protocol.calls import parse_call
from actors.protocol.card import model_card
from actors.serve_args import ServeArgs
from model.backbone import DTYPES, load_backbone
from model.decoding import GenerationRequest
from model.errors import JobError
from pipelines.benches.result import Result, device_name, machine
from pipelines.benches.serving.client import Outcome, Record, Target
from pipelines.benches.serving.load import Load
from pipelines.benches.serving.questions import Question, learn
from pipelines.benches.serving.service import Service
from pipelines.benches.serving.setting import ServingBenchConfig, check_threads, make_questions, serve_args, source_of
from pipelines.benches.serving.tally import Latency
from pipelines.benches.timing import Times, take_turns, timed

ENGINE = "engine"
PROXIES = {"Serve's proxy": False, "HAProxy": True}
REDEPLOY_S = 120.0
INSTANT = "pipelines.benches.serving.instant:InstantReplica"


class ServeBenchConfig(ServingBenchConfig):
    """Time answers through HTTP against the engine called directly, and the gateway alone."""

    output_name: ClassVar[str] = "bench/serve.json"

    streams: int = Field(8, ge=1, description="requests at a time in `streams`")
    haproxy: bool = Field(True, description="whether to measure behind HAProxy too")
    clients: tuple[int, ...] = Field((1, 8, 32), description="requests at a time in `gateway`, one line each")
    requests: int = Field(400, ge=1, description="requests of one measurement in `gateway`")


def run_serve(config: ServeBenchConfig) -> Result:
    """Measure both parts. Raises JobError where HTTP and the engine differ in a text, or a request fails."""
    check_threads(config, 1, len(os.sched_getaffinity(0)))
    source, name = source_of(config)
    proxies = {name: on for name, on in PROXIES.items() if config.haproxy or not on}
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with direct_engine(config, source) as engine:
        for proxy, haproxy in proxies.items():
            with served(config, source, haproxy) as (service, target):
                lines, found = _measure_streams(config, target, engine, proxy)
                service.tell("redeploy", args=service.args, replica=INSTANT, timeout_s=REDEPLOY_S)
                table += [*lines, *_measure_gateway(config, target, proxy)]
            ratios |= found
    note = (
        f"{name}, {config.streams} streams at a time, answers of at most {config.max_tokens} tokens, an engine of "
        f"{config.rows} rows on {config.threads} core{'' if config.threads == 1 else 's'}; clients on the same machine."
    )
    return Result("serve", machine("float32"), config.rounds, table, ratios, note)


@contextmanager
def served(config: ServeBenchConfig, source: str, haproxy: bool) -> Iterator[tuple[Service, Target]]:
    """A service behind either proxy. HAProxy hides who asks, so keys are needed there; they are used in both."""
    key = secrets.token_hex(16)
    environment = {KEYS_VARIABLE: key, "RAY_SERVE_ENABLE_HA_PROXY": "1" if haproxy else "0"}
    cores = len(os.sched_getaffinity(0))
    # Two replicas for a moment, when the second part takes over from the first.
    with Service(serve_args(config, source), environment, cpus=max(cores, 2 * config.threads)) as service:
        yield service, Target(service.url, key=key)


# ------------------------------------------------------------------------------------------------- streams
@dataclass
class DirectEngine:
    """The engine in this process, fed as its replica is: the next request when one has ended."""

    engine: Engine
    args: ServeArgs
    streams: int
    requests: list[GenerationRequest] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    first_block: list[float] = field(default_factory=list)

    def prepare(self, questions: Sequence[Question]) -> None:
        """The questions exactly as the gateway would hand them on."""
        backbone = self.engine.decoder.backbone
        card = model_card(backbone, name=self.args.served_name, max_length=self.args.engine.max_length)
        decode = self.args.decode.decode_config(adapted=backbone.block_diffusion is not None)
        self.requests = [
            parse_call(q.fields, kind="chat", card=card, decode=decode, request_id=str(i), default_seed=0).request
            for i, q in enumerate(questions)
        ]

    def run(self) -> None:
        """All requests once, `streams` at a time."""
        self.texts, self.tokens, self.first, self.first_block = {}, 0, [], []
        waiting = iter(self.requests)
        ended = threading.Semaphore(0)
        begun: dict[str, float] = {}
        blocks: dict[str, _FirstBlock] = {}

        def begin() -> None:
            request = next(waiting, None)
            if request is not None:
                begun[request.id] = time.monotonic()
                blocks[request.id] = _FirstBlock(begun[request.id], self._left_of_block(request))
                self.engine.submit(request, listen)

        def take(request_id: str, tokens: int) -> None:
            if (seconds := blocks[request_id].take(tokens)) is not None:
                self.first_block.append(seconds)

        def listen(event: Event) -> None:  # on the engine's thread
            if isinstance(event, Delta):
                if event.text and event.id in begun:
                    self.first.append(time.monotonic() - begun.pop(event.id))
                take(event.id, len(event.token_ids))
            elif isinstance(event, Finished | Failed):
                take(event.id, self.args.engine.max_length or 2**31)  # a short answer is all there is
                if isinstance(event, Finished):
                    self.texts[event.id] = event.result.text
                    self.tokens += event.result.completion_tokens
                begin()
                ended.release()

        for _ in range(self.streams):
            begin()
        for _ in self.requests:
            ended.acquire()

    def _left_of_block(self, request: GenerationRequest) -> int:
        """Tokens of the answer that its first block has room for, behind the prompt's tail."""
        adapted = self.engine.decoder.backbone.block_diffusion
        size = adapted.block_size if adapted else 1
        return min(size - len(request.prompt_ids) % size, request.max_tokens)

    def check(self, questions: Sequence[Question]) -> None:
        """Raises JobError unless the texts are those that came through HTTP."""
        for number, question in enumerate(questions):
            assert question.answer is not None, "it was learned"
            if self.texts.get(str(number)) != question.answer.text:
                raise JobError(f"serve: the engine and HTTP differ in the answer to question {number}.")


@dataclass
class _FirstBlock:
    """Waits until `left` tokens are there: the seconds that took, once."""

    begun: float
    left: int

    def take(self, tokens: int) -> float | None:
        open_before, self.left = self.left > 0, self.left - tokens
        return time.monotonic() - self.begun if open_before and self.left <= 0 else None


@contextmanager
def direct_engine(config: ServeBenchConfig, source: str) -> Iterator[DirectEngine]:
    """An engine of the replica's own shape and threads."""
    args = ServeArgs.model_validate(serve_args(config, source))
    torch.set_num_threads(config.threads)
    backbone = load_backbone(source, dtype=DTYPES[args.dtype_name], device=device_name())
    engine = Engine(backbone, EngineConfig(**args.engine.model_dump()))
    engine.start()
    try:
        yield DirectEngine(engine, args, config.streams)
    finally:
        engine.stop()


@dataclass
class HttpStreams:
    """The same questions through HTTP."""

    target: Target
    questions: Sequence[Question]
    streams: int
    records: list[Record] = field(default_factory=list)

    def run(self) -> None:
        """All of them once. Raises JobError where one is not answered, or answered otherwise than before."""
        load = Load(self.target, self.questions, clients=self.streams, stream=True, limit=len(self.questions))
        _run_whole(load)
        self.records += load.records


def _measure_streams(
    config: ServeBenchConfig, target: Target, engine: DirectEngine, proxy: str
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    questions = learn(target, make_questions(config), distinct=False)
    engine.prepare(questions)
    http = HttpStreams(target, questions, config.streams)
    direct_first: list[float] = []
    first_block: list[float] = []

    def direct() -> None:
        engine.run()
        direct_first.extend(engine.first)
        first_block.extend(engine.first_block)

    times = take_turns({ENGINE: direct, proxy: http.run}, config.rounds, title=f"serve: streams, {proxy}")
    engine.check(questions)
    lines = [
        {
            **_stream_line(f"{ENGINE}, beside {proxy}", engine.tokens, times, ENGINE),
            "TTFT p50 s": median(direct_first),
            "first block p50 s": median(first_block),
        },
        {**_stream_line(proxy, engine.tokens, times, proxy), "TTFT p50 s": Latency.of(http.records).ttft_p50},
    ]
    return lines, {
        f"tokens/s through HTTP over the engine, {proxy}": times.ratio(ENGINE, proxy),
        f"first block over first sub-block, beside {proxy}": median(first_block) / median(direct_first),
    }


def _stream_line(name: str, tokens: int, times: Times, form: str) -> dict[str, Any]:
    return {"part": "streams", "decoder": name, "tokens": tokens, "tokens/s": tokens / times.median(form)}


# ------------------------------------------------------------------------------------------------- gateway
def _measure_gateway(config: ServeBenchConfig, target: Target, proxy: str) -> list[dict[str, Any]]:
    question = make_questions(config)[0]
    lines = []
    for clients in config.clients:
        rates: list[float] = []
        records: list[Record] = []
        for number in range(-1, config.rounds):  # the first is a warm-up
            load = Load(target, [question], clients=clients, stream=False, limit=config.requests)
            seconds = timed(partial(_run_whole, load))
            if number >= 0:
                rates.append(config.requests / seconds)
                records += load.records
        latency = Latency.of(records)
        figures = {"requests/s": median(rates), "p50 s": latency.p50, "p99 s": latency.p99}
        lines.append({"part": "gateway", "decoder": proxy, "at a time": clients, **figures})
    return lines


def _run_whole(load: Load) -> None:
    """All requests of the load. Raises JobError where one has no answer."""
    with load:
        load.wait()
    failed = [record for record in load.records if record.outcome is not Outcome.RIGHT]
    if failed:
        raise JobError(f"serve: a request through HTTP failed: {failed[0].outcome}, {failed[0].detail}")
