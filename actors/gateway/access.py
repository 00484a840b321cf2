"""Who may ask: whoever shows a configured API key; without configured keys, this machine alone and without a key.

Keys come from a file (one a line, `#` starts a comment) or from the environment variable BLOCKCAST_API_KEYS (separated
by commas). Only SHA-256 hashes leave this module; a line may also be given as `sha256:<64 hex digits>`, so that no key
need be stored at all. Every comparison takes the same time whether or not a key matches.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.protocol.fields import RequestError
from model.errors import UserError

KEYS_VARIABLE = "BLOCKCAST_API_KEYS"
KEY_NAME = 12  # hex digits of a key's hash that name it in limits and logs
HASHED = re.compile(r"sha256:([0-9a-f]{64})")


def load_key_hashes(file: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The hashes (hex) of all configured keys; empty when neither file nor variable is set. Raises UserError."""
    lines: list[str] = []
    if file is not None:
        lines += _file_lines(file)
    if KEYS_VARIABLE in environ:
        keys = [key.strip() for key in environ[KEYS_VARIABLE].split(",") if key.strip()]
        if not keys:
            raise UserError(f"{KEYS_VARIABLE} is set but holds no key: unset it, or name keys separated by commas.")
        lines += keys
    return tuple(dict.fromkeys(_hash(line) for line in lines))


def _file_lines(file: str) -> list[str]:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"api_keys_file {file} cannot be read ({type(error).__name__}): give a text file, one key a line."
        ) from error
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise UserError(f"api_keys_file {file} holds no key: write one key a line, or leave the setting out.")
    return keys


def _hash(key: str) -> str:
    given = HASHED.fullmatch(key)
    return given[1] if given else hashlib.sha256(key.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether a client address or a host name (without port) is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Access:
    """The rule of one server. key_hashes: SHA-256 in hex; empty means loopback only."""

    key_hashes: tuple[str, ...] = ()

    def check(
        self, *, authorization: str | None, client: str | None, host: str | None, forwarded: bool = False
    ) -> str | None:
        """Who asks: a name of the key (the beginning of its hash), None without keys. Raises RequestError 401 or 403.

        host: the Host header, which a page of another origin cannot fake.

        forwarded: another proxy passed the request on, so `client` is not who asked.
        """
        if self.key_hashes:
            return self._checked_key(authorization)[:KEY_NAME]
        if forwarded or not (client and is_loopback(client) and host and is_loopback(_without_port(host))):
            raise RequestError(
                "Without API keys only this machine is served: configure keys to serve others.", status=403
            )
        return None

    def _checked_key(self, authorization: str | None) -> str:
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        known = [hmac.compare_digest(digest, known) for known in self.key_hashes]
        if scheme.lower() != "bearer" or not any(known):
            raise RequestError(
                "The API key is missing or wrong: send `Authorization: Bearer <key>`.",
                status=401,
                code="invalid_api_key",
            )
        return digest


def _without_port(host: str) -> str:
    return host if host.endswith("]") or (host.count(":") > 1 and "]" not in host) else host.rsplit(":", 1)[0]
