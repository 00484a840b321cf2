"""The engine loop: receive -> schedule -> forward -> publish. A plain class, no Ray; one thread owns the model.

    engine = Engine(backbone, EngineConfig(max_rows=8))
    results = together.generate_all(engine, requests)   # in this thread, or:
    engine.start(); engine.submit(request, listener)    # from any thread; the listener runs on the engine's thread

Rows join and leave at block boundaries, each at its own pace; a listener hears `Delta`s, then `Finished` or `Failed`.
A row whose pages are needed by an older one waits for new ones and goes on where it was.
A row whose logits are not finite fails alone; a forward that raises fails the rows that were in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

from actors.engine.auto_mode import ModeChooser, calibration_rows
from actors.engine.backlog import Backlog, BacklogMeter, Work
from actors.engine.calibration import measure_costs, rows_that_fit
from actors.engine.events import Canvas, Delta, Failed, Finished, Listener
from actors.engine.scheduler import Demand, Planner, Queue, plan_round
from actors.engine.stats import Counters, EngineStats, answer_tokens
from actors.engine.timeline import Timelines, now_ns
from model.backbone import Backbone
from model.decoding import (
    Decoder,
    GenerationRequest,
    Outcome,
    Phase,
    Row,
    Turn,
)
from model.errors import JobError, UserError
from model.sources import first_line

logger = logging.getLogger(__name__)
IDLE_WAIT_S = 0.5


@dataclass(frozen=True)
class EngineConfig:
    """max_rows: requests that run at once. max_length: longest prompt and answer, tokens (None: the model's context).

    prefill_tokens: prompt tokens encoded in one round, over all rows. pages: of one block each in the cache (None: room
    for max_rows rows of max_length, but for no more than 65,536 tokens unless one row needs it). prefix_cache: whether
    blocks that are committed can be found by later requests. rounds_per_visit: rounds between two looks at arrivals,
    aborts and listeners, as long as no row ends. weights: on CPU, "model" decodes in the model's number format, "int8"
    with quantised copies of the weights; kernels: whether the C++ forward may be used there (see `model.kernels`).
    """

    max_rows: int = 8
    max_length: int | None = None
    prefill_tokens: int = 512
    pages: int | None = None
    prefix_cache: bool = True
    rounds_per_visit: int = 1
    weights: str = "model"
    kernels: bool = True

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_length", "prefill_tokens", "pages", "rounds_per_visit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"engine.{name} must be at least 1, not {value!r}.")


# ------------------------------------------------------------------------------------------------- the loop
class Engine:
    """Requests in, events out. `submit` and `abort` are thread-safe; `step` belongs to one thread.

    `progress_at`: time.monotonic() of the last finished round, or of the last look around while idle;
    `longest_round_s`: of the rounds so far.
    planner: who runs in a round; another one than `plan_round` is for comparisons.
    """

    def __init__(
        self, backbone: Backbone, config: EngineConfig | None = None, *, planner: Planner = plan_round
    ) -> None:
        self.config = config or EngineConfig()
        self._planner = planner
        self.decoder = Decoder(
            backbone,
            rows=self.config.max_rows,
            max_length=self.config.max_length,
            pages=self.config.pages,
            prefix_cache=self.config.prefix_cache,
            weights=self.config.weights,
            kernels=self.config.kernels,
        )
        self.progress_at = time.monotonic()
        self.longest_round_s = 0.0
        self._lock = threading.Condition()
        self._requests: dict[str, tuple[GenerationRequest, Listener]] = {}  # all that have not ended
        self._arrivals: deque[str] = deque()
        self._aborts: deque[str] = deque()
        self._queue = Queue()
        self._rows: dict[str, Row] = {}  # running, in order of admission
        self._waiting_rows: dict[str, Row] = {}  # of those who wait: made, or preempted
        self._counters = Counters()
        self._meter = BacklogMeter()
        self._timelines = Timelines()
        self._chooser: ModeChooser | None = None  # made when the first "auto" request comes
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False

    @property
    def max_length(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.decoder.max_length

    # ------------------------------------------------------------------------------------------- callers' side
    def submit(self, request: GenerationRequest, listener: Listener) -> None:
        """Queue a request. The listener must be quick and must not raise.

        Raises UserError for what can never run here or an id that is in use, JobError when the engine has stopped.
        """
        self.decoder.check(request)
        with self._lock:
            if self._closed:
                raise JobError("The engine has stopped: it takes no more requests.")
            if request.id in self._requests:
                raise UserError(f"request id {request.id!r} is in use: ids of unfinished requests must differ.")
            if request.follows not in self._requests:  # only who came before: else two could wait for each other
                request = replace(request, follows=None)
            self._requests[request.id] = (request, listener)
            self._timelines.queued(request.id)
            self._arrivals.append(request.id)
            self._lock.notify_all()

    def abort(self, request_id: str) -> None:
        """Forget a request: its slot is free before the next round, its listener hears nothing more after this round.

        Unknown or finished ids are ignored: the answer may have ended while the caller was leaving.
        """
        with self._lock:
            self._aborts.append(request_id)
            self._lock.notify_all()

    def stats(self) -> EngineStats:
        with self._lock:
            counters, pool = self._counters, self.decoder.cache.pool
            return EngineStats(
                running=len(self._rows),
                waiting=len(self._requests) - len(self._rows),
                rounds=counters.rounds,
                rounds_by_mix=dict(counters.rounds_by_mix),
                forwards=dict(counters.forwards),
                query_tokens=counters.query_tokens,
                query_tokens_by_phase=dict(counters.query_tokens_by_phase),
                committed_tokens=counters.committed_tokens,
                drafted_tokens=counters.drafted_tokens,
                accepted_tokens=counters.accepted_tokens,
                pages_used=pool.used,
                pages_cached=pool.cached,
                pages_free=pool.free,
                prefix_hits=pool.hits,
                preemptions=counters.preemptions,
                round_s=counters.round_s,
                forward_s=counters.forward_s,
                model_s=self.decoder.model_s,
            )

    def backlog(self) -> Backlog:
        """Query tokens still to run, of running and waiting requests; see `actors.engine.backlog`."""
        with self._lock:
            return self._meter.measure(self._work(request) for request, _ in self._requests.values())

    def _work(self, request: GenerationRequest) -> Work:
        row = self._rows.get(request.id) or self._waiting_rows.get(request.id)
        if row is None:
            answered = len(request.answered)
            prompt = 0 if request.follows and self.config.prefix_cache else len(request.prompt_ids)
            return Work(prompt + answered, answered, request.max_tokens)
        return Work(row.prefill_left, row.frontier - row.prompt_length, request.max_tokens)

    # ------------------------------------------------------------------------------------------- engine's side
    def step(self) -> bool:
        """A round, or `rounds_per_visit` of them while no row ends; False when there was nothing to do."""
        self._receive()
        for number in range(self.config.rounds_per_visit):
            started, began_ns = time.monotonic(), now_ns()
            turns = self._schedule()
            if not turns:
                self._check_idle()
                return number > 0
            forwarded = time.monotonic()
            outcomes = self._forward(turns)
            forward_s = time.monotonic() - forwarded
            self._timelines.round(outcomes, began_ns)
            for outcome in outcomes:
                self._publish(outcome)
            self.progress_at = time.monotonic()
            round_s = self.progress_at - started
            self.longest_round_s = max(self.longest_round_s, round_s)
            with self._lock:
                self._counters.count(turns, outcomes, round_s, forward_s)
                self._meter.cost.learn(*answer_tokens(turns, outcomes))
            if any(outcome.row.request.id not in self._rows for outcome in outcomes):
                break
        return True

    def run_until_idle(self) -> None:
        """Rounds until nothing runs or waits."""
        while self.step():
            pass

    def start(self) -> None:
        """Run rounds on a background thread until `stop`."""
        if self._thread is not None:
            raise JobError("The engine runs already.")
        self._stopping = self._closed = False
        self._thread = threading.Thread(target=self._run, name="blockcast-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its round. Requests that have not ended fail."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def alive(self) -> bool:
        """Whether the background thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        message = "The engine stopped on an internal error: see its log."
        try:
            while not self._stopping:
                if not self.step():
                    self._wait()
            message = "The engine was stopped before the answer was complete."
        finally:  # an unexpected exception ends the thread, loudly, but nobody waits for ever
            self._close(message)

    def _wait(self) -> None:
        with self._lock:
            if not (self._stopping or self._arrivals or self._aborts):
                self._lock.wait(IDLE_WAIT_S)
        self.progress_at = time.monotonic()

    def _close(self, message: str) -> None:
        with self._lock:
            self._closed = True
            listeners = [(request_id, listener) for request_id, (_, listener) in self._requests.items()]
            for row in self._rows.values():
                self.decoder.release(row)
            self._rows.clear()
            self._waiting_rows.clear()
            self._requests.clear()
            self._arrivals.clear()
            self._queue = Queue()
        for request_id, listener in listeners:
            listener(Failed(request_id, message, elsewhere=True, timeline=self._timelines.end(request_id)))

    # ------------------------------------------------------------------------------------------- the four verbs
    def _receive(self) -> None:
        """Take in arrivals and aborts; let those who wait begin, as far as rows and pages go."""
        with self._lock:
            while self._arrivals:
                self._queue.join(self._arrivals.popleft())
            while self._aborts:
                self._forget(self._aborts.popleft())
        self._measure_when_asked()
        with self._lock:
            for request_id in list(self._queue):
                if self._waits_for_prompt(request_id):
                    continue
                if len(self._rows) == self.config.max_rows or not self._admit(request_id):
                    break

    def _waits_for_prompt(self, request_id: str) -> bool:
        """Whether the request follows one whose prompt, the same, is still to be encoded: then it finds it in pages."""
        leader = self._requests[request_id][0].follows
        if leader is None:
            return False
        row = self._rows.get(leader)
        return leader in self._queue or (row is not None and row.phase is Phase.PREFILL)

    def _admit(self, request_id: str) -> bool:
        """Start a waiting request if its first pages are there, with one page in reserve for every running row."""
        row = self._waiting_rows.get(request_id)
        if row is None:
            request = self._in_one_mode(request_id)
            if request is None:
                return False
            row = self._waiting_rows[request_id] = self.decoder.make_row(request)
        if self.decoder.cache.pool.available < self.decoder.pages_to_admit(row) + len(self._rows):
            return False
        self._queue.leave(request_id)
        self.decoder.admit(row)
        self._rows[request_id] = self._waiting_rows.pop(request_id)
        self._timelines.begun(row)
        return True

    def _in_one_mode(self, request_id: str) -> GenerationRequest | None:
        """The request, with "auto" settled for as many rows as will run beside it; None: not before pages are free."""
        request = self._requests[request_id][0]
        if request.decode.mode != "auto":
            return request
        mode = "ar"
        if self.decoder.backbone.block_diffusion is not None:
            if self._chooser is None:
                return None
            busy = min(self.config.max_rows, len(self._rows) + len(self._queue))
            mode = self._chooser.choose(request.max_tokens, busy)
        return replace(request, decode=replace(request.decode, mode=mode))

    def _measure_when_asked(self) -> None:
        """The first "auto" request has the engine time its rounds. Takes seconds: the lock is free, callers go on."""
        if self._chooser is not None or self.decoder.backbone.block_diffusion is None:
            return
        asked = any(self._requests[request_id][0].decode.mode == "auto" for request_id in self._queue)
        if asked and rows_that_fit(self.decoder):
            counts = calibration_rows(self.config.max_rows)
            self._chooser = ModeChooser(measure_costs(self.decoder, counts, each=self._touch))

    def _touch(self) -> None:
        self.progress_at = time.monotonic()

    def _schedule(self) -> list[Turn]:
        """The turns of the next round, oldest row first, with the pages they need."""
        decoding = {row_id: Turn(row) for row_id, row in self._rows.items() if row.phase is not Phase.PREFILL}
        demands = [
            Demand(
                row_id,
                row.prefill_left,
                len(decoding[row_id].query) if row_id in decoding else 0,
                row.block_size,
                row.phase.value,
            )
            for row_id, row in self._rows.items()
        ]
        turns = []
        for grant in self._planner(demands, self.config.prefill_tokens):
            row = self._rows.get(grant.id)
            if row is not None:
                turn = decoding.get(grant.id) or Turn(row, grant.tokens)
                if self._supply(turn):
                    turns.append(turn)
        return turns

    def _supply(self, turn: Turn) -> bool:
        """Get the turn its pages; while they lack, the newest row gives its own up. False: that was this row itself."""
        while self.decoder.cache.pool.available < self.decoder.missing_pages(turn):
            newest = next(reversed(self._rows))
            self._preempt(newest)
            if newest == turn.row.request.id:
                return False
        self.decoder.supply(turn)
        return True

    def _preempt(self, request_id: str) -> None:
        with self._lock:
            row = self._waiting_rows[request_id] = self._rows.pop(request_id)
            self.decoder.preempt(row)
            self._queue.join_first(request_id)
            self._counters.preemptions += 1
            self._timelines.preempted(request_id)

    def _forward(self, turns: list[Turn]) -> list[Outcome]:
        try:
            return self.decoder.step(turns)
        except (RuntimeError, MemoryError) as error:  # these rows' caches are undefined now
            logger.exception("a forward over %d rows failed", len(turns))
            message = f"The forward failed: {first_line(error)}"
            return [Outcome(turn.row, turn.row.phase, error=message) for turn in turns]

    def _publish(self, outcome: Outcome) -> None:
        row = outcome.row
        request, listener = self._requests[row.request.id]
        if outcome.error is not None:
            self._end(request.id, Failed(request.id, outcome.error), listener)
            return
        if request.trace and outcome.reveals:
            listener(_canvas(outcome))
        token_ids, text = row.take_delta()
        if token_ids or text:
            listener(Delta(request.id, token_ids, text, row.logprobs(len(token_ids))))
        if row.phase is Phase.DONE:
            result = row.result()
            if self._chooser is not None and result.mode == "diffusion":
                self._chooser.learn(result.completion_tokens, result.forwards["denoise"] + result.forwards["commit"])
            with self._lock:
                self._meter.lengths.learn(result.completion_tokens)
            self._end(request.id, Finished(result), listener)

    def _end(self, request_id: str, event: Finished | Failed, listener: Listener) -> None:
        event = replace(event, timeline=self._timelines.end(request_id))
        with self._lock:
            self._forget(request_id)
        listener(event)

    def _forget(self, request_id: str) -> None:
        """Free whatever a request holds; the lock is held."""
        self._requests.pop(request_id, None)
        self._waiting_rows.pop(request_id, None)
        self._timelines.forget(request_id)
        if request_id in self._queue:
            self._queue.leave(request_id)
        if request_id in self._rows:
            self.decoder.release(self._rows.pop(request_id))

    def _check_idle(self) -> None:
        """When nothing runs every page must be free: a leak would shrink the engine until it stands still."""
        self.decoder.cache.pool.check()


def _canvas(outcome: Outcome) -> Canvas:
    row = outcome.row
    return Canvas(
        row.request.id,
        block_start=outcome.block_start,
        reveals=outcome.reveals,
        block_size=max(row.block_size, len(outcome.reveals)) if row.causal else row.block_size,
        sub_block_size=row.sub_block_size,
        prompt_tokens=row.prompt_length,
    )
