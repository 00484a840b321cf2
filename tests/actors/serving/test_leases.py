"""Nobody works for a client that is gone, and nobody's work is ended by a word that came late."""

from __future__ import annotations

from actors.serving.leases import GRACE_S, LEASE_S, Leases


def test_a_request_lives_as_long_as_its_gateway_names_it() -> None:
    leases = Leases()
    leases.open("r", "g", 0.0)
    for now in range(1, 60):
        assert leases.renew("g", ["r"], float(now)) == []
        assert not leases.expired("r", float(now))
    assert leases.renew("g", [], 61.0) == ["r"]


def test_a_renewal_that_was_on_its_way_does_not_end_a_new_request() -> None:
    leases = Leases()
    leases.open("r", "g", 10.0)
    assert leases.renew("g", [], 10.0 + GRACE_S / 2) == []
    assert leases.renew("g", [], 10.0 + GRACE_S + 0.1) == ["r"]


def test_a_silent_gateway_loses_its_requests_and_no_others() -> None:
    leases = Leases()
    leases.open("mine", "silent", 0.0)
    leases.open("other", "alive", 0.0)
    late = LEASE_S + 1
    leases.renew("alive", ["other"], late - 1)
    assert leases.expired("mine", late) and not leases.expired("other", late)
    assert leases.renew("alive", ["other"], late) == []


def test_what_is_closed_is_expired_and_leaves_nothing_behind() -> None:
    leases = Leases()
    leases.open("r", "g", 0.0)
    leases.open("r~1", "g", 0.0)
    leases.open("rr", "g", 0.0)
    assert leases.family("r") == ["r", "r~1"]
    for request_id in ("r", "r~1", "rr"):
        leases.close(request_id)
        assert leases.expired(request_id, 0.0)
    leases.close("never opened")
    assert not leases._leases and not leases._heard_at


def test_a_word_from_elsewhere_that_the_gateway_lives_counts_like_a_renewal() -> None:
    leases = Leases()
    leases.open("r", "g", 0.0)
    assert leases.expired("r", LEASE_S + 1) and leases.heard("r", LEASE_S + 1)
    assert not leases.expired("r", LEASE_S + 2)
    leases.close("r")
    assert not leases.heard("r", LEASE_S + 3) and not leases._heard_at
