"""Whether this node is well, for a container's health check: exit code 0 or 1, and one line that says why.

Well is: Ray's agent says that the raylet lives (on the head: that the GCS does too), and, where Serve's proxy listens
here, that the proxy is well. Needs no token and imports nothing that is slow. Ports: RAY_AGENT_PORT (52365), SERVE_PORT
(8000).
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.request

HOST = "127.0.0.1"
ASK_S = 4.0


def main() -> int:
    """Ask both; returns the exit code."""
    serve_port = int(os.environ.get("SERVE_PORT", "8000"))
    urls = [f"http://{HOST}:{os.environ.get('RAY_AGENT_PORT', '52365')}/api/healthz"]
    if listens(serve_port):
        urls.append(f"http://{HOST}:{serve_port}/-/healthz")
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=ASK_S):
                pass
        except OSError as error:
            print(f"unhealthy: {url}: {error}")
            return 1
    print("healthy")
    return 0


def listens(port: int) -> bool:
    """Whether something on this machine accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


if __name__ == "__main__":
    sys.exit(main())
