"""Who gets in, who is told to come back, and when."""

from __future__ import annotations

import pytest

from actors.gateway.admission import Admission
from actors.protocol.fields import RequestError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(admission: Admission, key: str | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        admission.enter(key)
    assert caught.value.status == 429 and caught.value.code == "rate_limit_exceeded"
    return caught.value


def test_one_key_may_not_take_all_slots_and_gives_them_back() -> None:
    admission = Admission(limit=4, per_key=2)
    admission.enter("a")
    admission.enter("a")
    assert "API key" in str(refused(admission, "a"))
    admission.enter("b")
    admission.enter()
    assert "full" in str(refused(admission, "b"))
    admission.leave("a")
    admission.enter("a")
    for key in ("a", "a", "b", None):
        admission.leave(key)
    assert admission.inside == 0 and not admission._of_key


def test_the_wait_that_is_told_follows_the_pace_of_those_who_left() -> None:
    clock = Clock()
    admission = Admission(limit=1, clock=clock)
    admission.enter()
    assert refused(admission).retry_after_s == 1
    for _ in range(10):  # one leaves every 7 s
        clock.now += 7
        admission.leave()
        admission.enter()
    assert refused(admission).retry_after_s in (6, 7)
    clock.now += 10_000  # and then nobody for hours
    assert refused(admission).retry_after_s == 60
