"""One model of a replica: its weights, its engine with a thread, and the proof that it generates."""

from __future__ import annotations

import threading
import time

from actors.engine.loop import Engine, EngineConfig
from actors.engine.observer import EngineObserver
from actors.engine.together import generate_all
from actors.gateway.backend import Served
from actors.protocol.calls import check_default
from actors.protocol.card import model_card
from actors.serve_args import ModelArgs, ServeArgs
from model.backbone import DTYPES, Backbone
from model.decoding import GenerationRequest, SamplingParams
from model.errors import JobError
from model.loading import load_model

STALL_ROUNDS = 3  # a round may take so many times the longest one so far before the engine counts as stuck


def check_engine(*, alive: bool, progress_at: float, now: float, stall_s: float) -> None:
    """Raises JobError for an engine whose thread ended, or that finished no round (nor looked around) for `stall_s`."""
    if not alive:
        raise JobError("The engine's thread has ended: see the replica's log.")
    if now - progress_at > stall_s:
        raise JobError(f"The engine finished no round for {now - progress_at:.0f} s.")


class LoadedModel:
    """A model that has generated a token. Errors in the arguments or the model end the constructor with one sentence.

    Whoever needs it to stay holds it: `close` waits for them.
    """

    def __init__(self, args: ServeArgs, which: ModelArgs) -> None:
        backbone = load_model(
            which.model or args.model,
            dtype=DTYPES[args.dtype_name],
            device=args.device,
            adapter=which.adapter,
            mode=args.decode.mode,
        )
        blocks = backbone.block_diffusion
        decode = args.decode.decode_config(adapted=blocks is not None, two_tower=bool(blocks and blocks.two_tower))
        card = model_card(
            backbone,
            name=which.name,
            max_length=args.engine.max_length,
            max_answer_tokens=args.max_answer_tokens,
        )
        self.served = Served(card, check_default(decode, backbone.block_diffusion), created=int(time.time()))
        self.engine = Engine(backbone, EngineConfig(**args.engine.model_dump()))
        prove(self.engine, backbone, self.served)
        self.observer = EngineObserver(self.engine, model=which.name, tracing=args.tracing)
        self.engine.start()
        self._stall_s = args.stall_s
        self._users = 0
        self._closed = False
        self._idle = threading.Condition()

    def hold(self) -> bool:
        """One more user, who calls `release` in the end. False: it is closed."""
        with self._idle:
            self._users += not self._closed
            return not self._closed

    def release(self) -> None:
        """One user fewer."""
        with self._idle:
            self._users -= 1
            self._idle.notify_all()

    def check(self, now: float) -> None:
        """Raises JobError when the engine stands still. now: time.monotonic()."""
        stall_s = max(self._stall_s, STALL_ROUNDS * self.engine.longest_round_s)
        check_engine(alive=self.engine.alive, progress_at=self.engine.progress_at, now=now, stall_s=stall_s)

    def close(self) -> None:
        """Wait until nobody uses the model, and let nobody use it from then on; the engine still runs."""
        with self._idle:
            self._idle.wait_for(lambda: not self._users)
            self._closed = True

    def stop(self) -> None:
        """End the engine and what watches it."""
        self.engine.stop()
        self.observer.close()


def prove(engine: Engine, backbone: Backbone, served: Served) -> None:
    """Generate one token for real, in the mode that requests will get. Raises JobError when none comes.

    The prompt fills a round's budget of prompt tokens, so that the longest kind of round is known from the start.
    """
    start = next(i for i in range(served.card.vocab_size) if i not in served.card.stop_token_ids)
    length = max(1, min(engine.config.prefill_tokens, engine.max_length - 1))
    request = GenerationRequest(
        id="ready",
        prompt_ids=(start,) * length,
        max_tokens=1,
        sampling=SamplingParams(),
        decode=served.decode,
        stop_token_ids=frozenset(),
    )
    results = generate_all(engine, [request])
    if len(results) != 1 or len(results[0].token_ids) != 1:
        raise JobError(f"{backbone.name} was loaded but generated no token: see the replica's log.")
