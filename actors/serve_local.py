"""Serve one model on this machine, in the foreground, until interrupted: what `make serve MODEL=... PORT=...` runs.

    python -m actors.serve_local --model out/demo/model --port 8000

Starts its own local Ray (whatever RAY_ADDRESS says), serves at `/` on loopback only, and prints a ready line once a
token was really generated through HTTP, with the `serve status` line that works from a second shell. SIGINT and
SIGTERM end it cleanly, with exit code 0. Exit code 2: bad usage, a bad model or a busy port; 1: it could not be served.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from actors.local_ray import init_ray
from actors.serve_args import EngineArgs, ServeArgs
from model.errors import JobError, UserError

HOST = "127.0.0.1"
APPLICATION = "blockcast"
DASHBOARD_PORT = 8265
OBJECT_STORE_BYTES = 200_000_000
# What Ray's processes must find in their environment for a broken part of Serve to be replaced within seconds.
SERVE_SETTINGS = {
    # Serve looks at its proxies every 10 s and replaces one after the third failure: half a minute without a server.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    # A replica that failed its checks would be given drain_s to end what it cannot end, and keep its GPU so long.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
FIRST_ANSWER_S = 120.0
DRAIN_S = 2.0
END_S = 15.0
SENTENCE = re.compile(r"^model\.errors\.(UserError|JobError): (.+)$", re.MULTILINE)


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        _raise_on_signals()
        serve_until_interrupted(arguments.model, arguments.port, max_rows=arguments.max_rows)
    except UserError as error:
        print(f"serve: {error}", file=sys.stderr, flush=True)
        return 2
    except JobError as error:
        print(f"serve: {error}", file=sys.stderr, flush=True)
        return 1
    except Interrupted:
        print("serve: stopped.", flush=True)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve", description="Serve one model on this machine until interrupted.")
    parser.add_argument("--model", required=True, help="a model folder, a Hub id or an fsspec URI")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1 (default 8000)")
    parser.add_argument("--max_rows", type=int, default=8, help="requests decoded together (default 8)")
    return parser.parse_args(argv)


def serve_until_interrupted(model: str, port: int, *, max_rows: int) -> NoReturn:
    """Everything after the arguments. Raises Interrupted at the end, UserError or JobError where it cannot serve."""
    check_port(port)
    check_model(model)
    args = ServeArgs(
        model=_absolute(model),
        served_name=model,
        cpus_per_replica=os.cpu_count() or 1,
        engine=EngineArgs(max_rows=max_rows),
        drain_s=DRAIN_S,
    )
    print(f"serve: starting Ray and loading {model} ...", flush=True)
    try:
        dashboard = _start_ray()
        _deploy(args, port)
        _first_token(model, port)
        print(ready_text(model, port, dashboard), flush=True)
        while True:
            signal.pause()
    finally:
        _shut_down()


def check_port(port: int) -> None:
    """Raises UserError when nothing can listen at the port."""
    if not 1 <= port <= 65535:
        raise UserError(f"PORT {port} is no port: choose one from 1 to 65535.")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            # Serve's proxies share ports (SO_REUSEPORT), so a busy one must be found here: plain bind, no sharing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            probe.listen()
        except PermissionError as error:
            raise UserError(f"Port {port} needs more rights than you have: choose one above 1023.") from error
        except OSError as error:
            raise UserError(f"Port {port} on {HOST} is busy: choose another with PORT=.") from error


def check_model(model: str) -> None:
    """Find what is plainly wrong with a model before Ray starts. Raises UserError."""
    from model.loading import describe_model  # slow to import: a busy port is told at once
    from model.sources import fetch_model

    if not model:
        raise UserError("No model is named: make serve MODEL=<folder or id> PORT=<port>.")
    folder = fetch_model(model)
    describe_model(folder)


def _absolute(model: str) -> str:
    """Workers have another working directory."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _start_ray() -> str:
    """A local Ray of our own with a dashboard, which `serve status` asks. Returns the dashboard's address."""
    for name, value in SERVE_SETTINGS.items():
        os.environ.setdefault(name, value)  # Ray's processes inherit them
    context = init_ray(
        address="local",
        num_cpus=os.cpu_count(),
        include_dashboard=True,
        dashboard_host=HOST,
        dashboard_port=_free_port(DASHBOARD_PORT),
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    _raise_on_signals()  # ray.init puts its own handler in place
    return f"http://{context.dashboard_url}"


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((HOST, port))
                return int(probe.getsockname()[1])
            except OSError:
                continue
    raise JobError("No port is free for Ray's dashboard.")


def _deploy(args: ServeArgs, port: int) -> None:
    """Run the application; what its constructor complained about becomes our own sentence."""
    from ray import serve

    from actors.server import build

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
    try:
        serve.run(build(args), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        found = SENTENCE.findall(str(error))
        if not found:
            raise JobError(f"The model could not be served: {' '.join(str(error).split())}") from error
        kind, sentence = found[-1]
        raise (UserError if kind == "UserError" else JobError)(sentence) from error


def _first_token(model: str, port: int) -> None:
    """One token through the whole path: HTTP, gateway, engine. Raises JobError when none comes."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{HOST}:{port}/v1/completions", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=FIRST_ANSWER_S) as response:
            answer = json.load(response)
    except (urllib.error.URLError, TimeoutError) as error:
        raise JobError(f"The model is loaded but answers no request ({error}).") from error
    if answer["usage"]["completion_tokens"] != 1:
        raise JobError("The model is loaded but generated no token.")


def ready_text(model: str, port: int, dashboard: str) -> str:
    """The ready line, and the line that shows HEALTHY from a second shell: our `serve`, address and authentication."""
    beside = Path(sys.executable).parent / "serve"
    command = [str(beside) if beside.exists() else "serve", "status", "--address", dashboard]
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    environment = [f"{name}={shlex.quote(os.environ[name])}" for name in names if os.environ.get(name)]
    return "\n".join(
        [
            f"serve: ready: {model} at http://{HOST}:{port}/v1 (a token was generated); Ctrl-C stops it",
            f"serve: from a second shell: {' '.join([*environment, shlex.join(command)])}",
        ]
    )


def _raise_on_signals() -> None:
    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _shut_down() -> None:
    """Take application and Ray down and wait for every process that was started; a second signal does not tear this."""
    import ray
    from ray import serve

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    started = psutil.Process().children(recursive=True)
    if ray.is_initialized():
        if APPLICATION in serve.status().applications:
            serve.delete(APPLICATION)
        ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=END_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
