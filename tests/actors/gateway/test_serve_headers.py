"""Serve's own headers: a timeout is a deadline that ends before Serve's own, and nobody may stay unwatched."""

from __future__ import annotations

import pytest

from actors.gateway.serve_headers import check_serve_headers
from actors.protocol.fields import RequestError


def test_the_answer_ends_a_little_before_serve_would_end_it() -> None:
    assert check_serve_headers({}) is None
    allowed = {asked: check_serve_headers({"x-request-timeout-seconds": asked}) for asked in ("0.3", "5", "60", "0.01")}
    assert allowed == {"0.3": pytest.approx(0.25), "5": 4.5, "60": 59.0, "0.01": 0.0}


@pytest.mark.parametrize("asked", ["0", "-1", "nan", "inf", "1e999", "soon", ""])
def test_a_timeout_that_is_none_is_refused_by_name(asked: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_serve_headers({"x-request-timeout-seconds": asked})
    assert refused.value.param == "x-request-timeout-seconds" and refused.value.status == 400


def test_a_client_that_wants_its_leaving_unseen_is_refused() -> None:
    assert check_serve_headers({"x-request-disconnect-disabled": "?0"}) is None
    with pytest.raises(RequestError) as refused:
        check_serve_headers({"x-request-disconnect-disabled": "?1"})
    assert refused.value.param == "x-request-disconnect-disabled"
