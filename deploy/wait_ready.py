"""Wait until what `serve deploy` was given really answers: `serve deploy FILE.yaml && python deploy/wait_ready.py`.

    python deploy/wait_ready.py --address http://localhost:8265 --timeout 600

`serve deploy` and `serve status` return 0 whatever became of the application. This asks the same dashboard (with the
token of RAY_AUTH_MODE=token, as they do) until every application is RUNNING with every deployment HEALTHY, and then the
application's own /ready, which answers 200 only when a token was really generated.

Exit code 0: all of that is so. 1: an application is DEPLOY_FAILED or UNHEALTHY, or the time is over; its message is
printed, or our own sentence from its traceback. 2: bad usage, or a dashboard that refuses the token. 130: interrupted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STATUS_PATH = "/api/serve/applications/"
POLL_S = 1.0
REPEAT_S = 30.0
ASK_S = 10.0
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
SENTENCE = re.compile(r"^model\.errors\.(?:UserError|JobError): (.+)$", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Refused(Exception):
    """The dashboard will not answer us, however long we wait: exit code 2."""


@dataclass(frozen=True)
class Deployment:
    """One deployment. scaled_by_load: what it does now is autoscaling, so it serves while it does it."""

    name: str
    status: str
    have: int
    want: int
    scaled_by_load: bool
    message: str = ""

    @property
    def serves(self) -> bool:
        return self.status == "HEALTHY" or (self.scaled_by_load and self.status in ("UPSCALING", "DOWNSCALING"))

    def __str__(self) -> str:
        return f"{self.name} {self.have} of {self.want} {self.status}"


@dataclass(frozen=True)
class Application:
    """One application as the dashboard tells it. route_prefix: None until Serve knows it."""

    name: str
    status: str
    message: str
    route_prefix: str | None
    deployments: tuple[Deployment, ...]

    @property
    def failed(self) -> bool:
        return self.status in FAILED

    @property
    def told(self) -> str:
        """Why: the application's own message may only name the deployments, theirs have the cause."""
        return "\n".join([self.message, *(d.message for d in self.deployments if not d.serves and d.message)])

    @property
    def runs(self) -> bool:
        return self.status == "RUNNING" and bool(self.deployments) and all(d.serves for d in self.deployments)

    def __str__(self) -> str:
        have, want = sum(d.have for d in self.deployments), sum(d.want for d in self.deployments)
        each = f" ({', '.join(map(str, self.deployments))})" if self.deployments else ""
        return f"{self.name}: have {have} of {want} replicas, status {self.status}{each}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        return wait(arguments)
    except Refused as error:
        print(f"wait_ready: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="wait_ready", description="Wait until a deployed application really answers.")
    parser.add_argument(
        "--address",
        type=_address,
        default=os.environ.get("RAY_DASHBOARD_ADDRESS") or "http://localhost:8265",
        help="Ray's dashboard (default: RAY_DASHBOARD_ADDRESS, else http://localhost:8265)",
    )
    parser.add_argument(
        "--url", type=_address, help="where Serve's HTTP is reached (default: the dashboard's host and Serve's port)"
    )
    parser.add_argument(
        "--application", action="append", default=[], help="name; may be given again (default: every application)"
    )
    parser.add_argument("--timeout", type=_seconds, default=600.0, help="seconds to wait (default 600)")
    return parser.parse_args(argv)


def _address(text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no http:// or https:// address")
    return text.rstrip("/")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def wait(arguments: argparse.Namespace) -> int:
    """Ask until it is settled; returns 0 or 1. Raises Refused."""
    deadline = time.monotonic() + arguments.timeout
    said, said_at = "", 0.0
    while True:
        state, code = look(arguments)
        if state != said or time.monotonic() - said_at > REPEAT_S:
            said, said_at = state, time.monotonic()
            print(f"wait_ready: {state}", flush=True)
        if code is not None:
            return code
        if time.monotonic() + POLL_S > deadline:
            print(f"wait_ready: not ready after {arguments.timeout:g} s: {state}", file=sys.stderr)
            return 1
        time.sleep(POLL_S)


def look(arguments: argparse.Namespace) -> tuple[str, int | None]:
    """One look: what is to be said, and the exit code where it is settled."""
    try:
        details = ask(arguments.address)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{arguments.address} does not answer ({_reason(error)})", None
    applications = read_applications(details)
    wanted = arguments.application or sorted(applications)
    if not wanted:
        return "no application is deployed", None
    for name in wanted:
        if name not in applications:
            there = f"there is {', '.join(sorted(applications))}" if applications else "none is"
            return f"application {name} is not deployed; {there}", None
    for application in (applications[name] for name in wanted):
        if application.failed:
            return f"{application.name} is {application.status}: {sentence(application.told)}", 1
    state = "; ".join(str(applications[name]) for name in wanted)
    if not all(applications[name].runs for name in wanted):
        return state, None
    base = arguments.url or http_base(details, arguments.address)
    unready = [why for name in wanted if (why := why_not_ready(base, applications[name])) is not None]
    return (f"{state}; {'; '.join(unready)}", None) if unready else (f"{state}; a token was generated: ready", 0)


# ------------------------------------------------------------------------------------------- what the dashboard tells
def ask(address: str) -> dict[str, Any]:
    """Serve's details. Raises Refused, OSError (no answer) or ValueError (no JSON)."""
    from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
    from ray.exceptions import AuthenticationError

    try:
        headers = get_auth_headers_if_auth_enabled({})
    except AuthenticationError as error:
        raise Refused(f"RAY_AUTH_MODE=token, but there is no token: {_reason(error)}") from error
    request = urllib.request.Request(address + STATUS_PATH, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ASK_S) as response:
            details = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise Refused(
                f"{address} refuses the token ({error.code}): set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN."
            ) from error
        raise
    if not isinstance(details, dict) or not isinstance(details.get("applications"), dict):
        raise ValueError("not Ray's dashboard: the answer lists no applications")
    return details


def read_applications(details: Mapping[str, Any]) -> dict[str, Application]:
    """The applications of Serve's details (`GET /api/serve/applications/`), by name."""
    return {
        name: Application(
            name=name,
            status=told["status"],
            message=told["message"],
            route_prefix=told["route_prefix"],
            deployments=tuple(_deployment(d) for d in told["deployments"].values()),
        )
        for name, told in details["applications"].items()
    }


def _deployment(told: Mapping[str, Any]) -> Deployment:
    return Deployment(
        name=told["name"],
        status=told["status"],
        have=sum(replica["state"] == "RUNNING" for replica in told["replicas"]),
        want=told["target_num_replicas"],
        scaled_by_load=told["status_trigger"] == "AUTOSCALING",
        message=told.get("message", ""),
    )


def sentence(message: str) -> str:
    """Our own last sentence in a traceback; without one the whole message, on lines of its own."""
    plain = COLOUR.sub("", message).strip()
    ours = SENTENCE.findall(plain)
    return ours[-1] if ours else plain if "\n" not in plain else f"\n{plain}"


# ------------------------------------------------------------------------------------------- what the application says
def http_base(details: Mapping[str, Any], address: str) -> str:
    """Where Serve's HTTP is, seen from here: the dashboard's host, Serve's own port."""
    host = urllib.parse.urlsplit(address).hostname or ""
    port = (details.get("http_options") or {}).get("port", 8000)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def why_not_ready(base: str, application: Application) -> str | None:
    """None when the application's /ready answers 200, else what it does instead."""
    if application.route_prefix is None:
        return f"{application.name} is not served over HTTP"
    url = f"{base}{application.route_prefix.rstrip('/')}/ready"
    try:
        with urllib.request.urlopen(url, timeout=ASK_S):
            return None
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer ({_reason(error)}): is it reached elsewhere? then name it with --url"


def _reason(error: BaseException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return " ".join(str(cause).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
