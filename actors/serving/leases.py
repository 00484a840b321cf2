"""Leases of requests: a replica works on a request only as long as its gateway says that somebody waits for it.

Cancelling a call is known to get lost on chains of handles, and a gateway can die; so each gateway renews its lease
about once a second, naming the requests that are still wanted. Numbers and names only: no Ray, no clock of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

LEASE_S = 10.0  # without a word from its gateway a request ends
GRACE_S = 3.0  # a request younger than this may be missing from a renewal that was on its way already


@dataclass
class _Lease:
    gateway: str
    opened_at: float


class Leases:
    """The open requests of one replica. Times in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._heard_at: dict[str, float] = {}

    def open(self, request_id: str, gateway: str, now: float) -> None:
        """A gateway sent a request, so it lives."""
        self._leases[request_id] = _Lease(gateway, now)
        self._heard_at[gateway] = now

    def close(self, request_id: str) -> None:
        """The request has ended here. A gateway without requests is forgotten."""
        lease = self._leases.pop(request_id, None)
        if lease is not None and not any(other.gateway == lease.gateway for other in self._leases.values()):
            self._heard_at.pop(lease.gateway, None)

    def renew(self, gateway: str, wanted: Collection[str], now: float) -> list[str]:
        """The gateway lives and wants these; returns its requests that it no longer wants."""
        mine = [(id_, lease) for id_, lease in self._leases.items() if lease.gateway == gateway]
        if mine:
            self._heard_at[gateway] = now
        return [id_ for id_, lease in mine if id_ not in wanted and now - lease.opened_at > GRACE_S]

    def heard(self, request_id: str, now: float) -> bool:
        """The gateway that asked lives, as somebody else says. False: the request is not open here any more."""
        lease = self._leases.get(request_id)
        if lease is not None:
            self._heard_at[lease.gateway] = now
        return lease is not None

    def expired(self, request_id: str, now: float) -> bool:
        """Whether nobody has asked for the request for too long (or ever)."""
        lease = self._leases.get(request_id)
        return lease is None or now - self._heard_at.get(lease.gateway, lease.opened_at) > LEASE_S

    def family(self, request_id: str) -> list[str]:
        """The open runs of a call: of its request, of other choices (`id.1`), and begun again (`id~1`, `id.1~1`)."""
        begins = (f"{request_id}~", f"{request_id}.")
        return [id_ for id_ in self._leases if id_ == request_id or id_.startswith(begins)]
