"""What a round costs on this machine: rows of the real decoder, timed. Takes a second or two, once an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from actors.engine.auto_mode import RoundCosts
from model.config import DecodeConfig
from model.decoding import Decoder, GenerationRequest, Phase, Row, Turn

ROUNDS = 4  # timed, the first not counted
FORMS = {"ar": DecodeConfig(mode="ar"), "diffusion": DecodeConfig(policy="sequential")}


def measure_costs(decoder: Decoder, rows: Sequence[int], each: Callable[[], None] = lambda: None) -> RoundCosts:
    """Seconds of a round for each number of rows, in both modes. Uses free pages and gives them back; publishes none.

    Numbers of rows that do not fit the free pages are left out; one must fit (`rows_that_fit`). each: called after each
    number and mode, for whoever watches the engine's progress.
    """
    costs: dict[str, dict[int, float]] = {name: {} for name in FORMS}
    for count in rows:
        if count > rows_that_fit(decoder):
            break
        for name, decode in FORMS.items():
            costs[name][count] = _round_seconds(decoder, count, decode)
            each()
    return RoundCosts(**costs)


def rows_that_fit(decoder: Decoder) -> int:
    """Rows of a measurement that find their pages now."""
    prompt, room = _lengths(decoder)
    return decoder.cache.pool.available // decoder.cache.pages_for(prompt + room + decoder.cache.page_size)


def _lengths(decoder: Decoder) -> tuple[int, int]:
    """Tokens of a row's prompt, a page and one more where they fit, and of its answer."""
    room = min(ROUNDS + 2, decoder.max_length - 1)
    return min(decoder.cache.page_size + 1, decoder.max_length - room), room


def _round_seconds(decoder: Decoder, count: int, decode: DecodeConfig) -> float:
    length, room = _lengths(decoder)
    prompt = (next(iter(decoder.backbone.stop_token_ids), 0),) * length
    requests = [GenerationRequest(f"calibration {i}", prompt, room, decode=decode) for i in range(count)]
    members = [decoder.make_row(request) for request in requests]
    try:
        while any(row.phase is Phase.PREFILL for row in members):
            decoder.step([Turn(row, row.prefill_left) for row in members], publish=False)
        return median(_timed(decoder, members) for _ in range(ROUNDS))
    finally:
        for row in members:
            decoder.release(row)


def _timed(decoder: Decoder, members: Sequence[Row]) -> float:
    turns = [Turn(row) for row in members if row.phase is not Phase.DONE]
    begun = time.perf_counter()
    decoder.step(turns, publish=False)
    return time.perf_counter() - begun
