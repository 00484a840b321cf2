"""The watchdog names the worker that keeps the others waiting, and nobody while anything moves."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from actors.training.board import Board
from actors.training.watchdog import BEHIND, Beat, Heart, Place, waits_for_others

TIMEOUT_S = 10.0


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Workers:
    """Two workers that beat to a board."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.board = Board({}, self.clock)
        self.places = [Place(7, 2, 3), Place(7, 2, 3)]
        self.waits = [False, False]
        self.last = False

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            beat = Beat(rank, 40 + rank, "n", "10.0.0.5", self.places[rank], self.waits[rank], self.last)
            self.board.beat(beat)

    def pass_s(self, seconds: float, *ranks: int) -> None:
        """Time passes while the workers of these ranks go on beating."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.beat(*ranks)

    @property
    def message(self) -> str | None:
        hang = self.board.hang(TIMEOUT_S)
        return hang and hang.message


def test_a_process_that_says_nothing_any_more_is_named_with_its_step_and_rank() -> None:
    workers = Workers()
    workers.beat(0, 1)
    workers.waits[0] = True
    workers.pass_s(9, 0)
    assert workers.message is None
    workers.pass_s(1, 0)
    assert workers.message == (
        "Step 7 has not moved for 10 s: worker 1 (process 41 on 10.0.0.5) hangs in its micro-batch 2 of 3."
    )


def test_a_process_stopped_between_two_steps_is_named_too() -> None:
    workers = Workers()
    workers.places[1] = Place(7, BEHIND, 3)
    workers.beat(0, 1)
    workers.pass_s(10, 0)
    assert workers.message is not None
    assert "Step 7 has not moved for 10 s: worker 1 (process 41" in workers.message
    assert workers.message.endswith("hangs behind its last micro-batch.")


def test_of_those_that_beat_the_furthest_behind_is_named() -> None:
    workers = Workers()
    workers.places[0] = Place(7, 0, 3)
    workers.beat(0, 1)
    workers.pass_s(11, 0, 1)
    assert workers.message is not None
    assert "worker 0 (process 40 on 10.0.0.5) hangs while reading its rows." in workers.message


def test_of_those_at_one_place_the_one_that_does_not_wait_for_others_is_named() -> None:
    workers = Workers()
    workers.waits[0] = True
    workers.beat(0, 1)
    workers.pass_s(11, 0, 1)
    assert workers.message is not None and "worker 1 (process" in workers.message
    workers.waits[1] = True
    workers.pass_s(1, 0, 1)
    assert workers.message is not None and "workers 0 (process 40" in workers.message


def test_nobody_hangs_while_one_moves_or_is_between_steps() -> None:
    workers = Workers()
    workers.beat(0, 1)
    for micro_batch in range(30):
        workers.places[0] = Place(7, micro_batch, 30)
        workers.pass_s(1, 0, 1)
        assert workers.message is None
    workers.places = [Place(7, BEHIND, 30)] * 2
    workers.pass_s(60, 0, 1)
    assert workers.message is None, "a checkpoint may take as long as it takes"
    workers.last = True
    workers.beat(0, 1)
    workers.clock.now += 60
    assert workers.message is None, "those that have ended owe no sign of life"
    assert Workers().message is None, "nobody has been heard yet"


def test_a_heart_tells_where_its_thread_stands_and_rests_at_once() -> None:
    told: list[Beat] = []
    heard = threading.Event()

    def tell(beat: Beat) -> None:
        told.append(beat)
        heard.set()

    with Heart(3, tell, 0.08) as heart:
        heart.at(6, 0, 2)
        heard.clear()
        assert heard.wait(30)
        assert told[-1].place == Place(7, 0, 2)
        heart.rest()
        assert told[-1].place == Place(7, BEHIND, 2)
        assert (told[-1].rank, told[-1].waits, told[-1].last) == (3, False, False)
    assert told[-1].last


def test_a_thread_inside_a_collective_is_seen_to_wait(tmp_path: Path) -> None:
    """A store that waits for a second process which never comes."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    patience = timedelta(seconds=3)
    begun, idents = threading.Event(), []

    def join() -> None:
        idents.append(threading.get_ident())
        begun.set()
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=patience)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    assert begun.wait(30)
    for _ in range(3000):
        if waits_for_others(idents[0]):
            break
        threading.Event().wait(0.01)
    assert waits_for_others(idents[0])
    thread.join(60)
    assert not waits_for_others(threading.get_ident())
