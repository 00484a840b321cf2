"""API keys: where they come from, and that only hashes are kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from actors.gateway.access import Access, is_loopback, load_key_hashes
from actors.protocol.fields import RequestError
from model.errors import UserError


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_keys_come_from_file_and_environment_as_hashes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# team\nalpha\n\nbeta # Kim\nsha256:{sha256('gamma')}\n", encoding="utf-8")
    assert load_key_hashes(str(file), {"BLOCKCAST_API_KEYS": "delta, alpha"}) == tuple(
        sha256(key) for key in ("alpha", "beta", "gamma", "delta")
    )
    assert load_key_hashes(None, {}) == ()


def test_a_key_source_without_keys_is_refused_rather_than_open(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("# nobody yet\n", encoding="utf-8")
    for file, environ in ((str(empty), {}), (str(tmp_path / "absent"), {}), (None, {"BLOCKCAST_API_KEYS": " , "})):
        with pytest.raises(UserError):
            load_key_hashes(file, environ)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "localhost.attacker.example", "example.com", ""])
def test_others_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_without_keys_client_and_host_must_both_be_local() -> None:
    access = Access()
    for host in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost"):
        access.check(authorization=None, client="127.0.0.1", host=host)
    for client, host in (("10.0.0.1", "localhost"), ("127.0.0.1", "attacker.example:8000"), (None, None)):
        with pytest.raises(RequestError) as refused:
            access.check(authorization=None, client=client, host=host)
        assert refused.value.status == 403
    with pytest.raises(RequestError):
        access.check(authorization=None, client="127.0.0.1", host="localhost", forwarded=True)
