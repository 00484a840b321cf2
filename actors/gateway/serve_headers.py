"""Serve's own request headers, which its proxy would act on in its own words, or without any.

`x-request-timeout-seconds: T` has the proxy answer a plain-text 408 after T seconds, or cut a stream without a word. So
the gateway takes it as a deadline that ends a little earlier, with the error that every deadline ends with.
`x-request-disconnect-disabled: ?1` has the proxy not look whether the client is still there: the answer of one that
left would be written to its end. It is refused. Another value of it asks for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from actors.protocol.fields import RequestError

TIMEOUT_HEADER = "x-request-timeout-seconds"
UNWATCHED_HEADER = "x-request-disconnect-disabled"
EARLIER_SHARE, LEAST_EARLIER_S, MOST_EARLIER_S = 0.1, 0.05, 1.0  # of the time, so that the answer arrives within it


def check_serve_headers(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer may take for Serve's sake; None where nothing is said. Raises RequestError."""
    if headers.get(UNWATCHED_HEADER) == "?1":
        message = f"{UNWATCHED_HEADER} is not supported: who leaves frees the work. Leave it out, or send ?0."
        raise RequestError(message, param=UNWATCHED_HEADER)
    asked = headers.get(TIMEOUT_HEADER)
    if asked is None:
        return None
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(f"{TIMEOUT_HEADER} must be seconds, above 0, not {asked[:40]!r}.", param=TIMEOUT_HEADER)
    earlier = min(MOST_EARLIER_S, max(LEAST_EARLIER_S, EARLIER_SHARE * seconds))
    return max(0.0, seconds - earlier)
