"""The process that runs a Ray of its own and the served application, and does what its standard input says.

    python -m pipelines.benches.serving.host '{"args": {...ServeArgs...}, "port": 8000}'

Commands and replies are JSON lines: {"id", "do", ...} in, {"id", "reply"} or {"id", "error"} out; the first reply, with
id 0, says that the application is up. End of input ends the process. What Python and Ray print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict

from actors.local_ray import init_ray
from actors.serve_args import GATEWAY, REPLICA, ServeArgs
from actors.serve_local import SERVE_SETTINGS
from actors.serving.replica import EngineReplica
from model.errors import JobError

APPLICATION = "served"
HOST = "127.0.0.1"
OBJECT_STORE_BYTES = 150_000_000
CALL_S = 30.0


class HostOptions(BaseModel):
    """What the host is started with. temp_dir: of Ray, for its sockets and logs; replica: `module:class`."""

    model_config = ConfigDict(extra="forbid")

    args: ServeArgs
    port: int
    cpus: int = 2
    temp_dir: str | None = None
    replica: str = "actors.serving.replica:EngineReplica"


def deploy(options: HostOptions) -> None:
    """Run the application, or roll a running one over to other arguments; returns when it is up."""
    from ray import serve

    from actors.server import application

    app = application(options.args, _replica_class(options.replica))
    serve.run(app, name=APPLICATION, route_prefix="/")


def _replica_class(name: str) -> type[EngineReplica]:
    module, _, attribute = name.partition(":")
    found: type[EngineReplica] = getattr(importlib.import_module(module), attribute)
    return found


def status(options: HostOptions) -> dict[str, Any]:
    """The application's status, and how many replicas of each deployment are in which state."""
    from ray import serve

    found = serve.status().applications[APPLICATION]
    deployments = {name: dict(found.deployments[name].replica_states) for name in (GATEWAY, REPLICA)}
    return {"application": str(found.status.value), **deployments}


def redeploy(options: HostOptions, *, args: dict[str, Any], replica: str | None = None) -> None:
    """Roll over to other arguments, or another class of replicas."""
    deploy(options.model_copy(update={"args": ServeArgs.model_validate(args), "replica": replica or options.replica}))


def call(options: HostOptions, *, method: str) -> Any:
    """Call a method of one engine replica, whichever Serve chooses, and return what JSON can hold."""
    from ray import serve

    handle = serve.get_deployment_handle(REPLICA, APPLICATION)
    return handle.options(method_name=method).remote().result(timeout_s=CALL_S)


def call_all(options: HostOptions, *, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
    """Call a method of every engine replica, and return what each of them returned."""
    from ray import serve

    handle = serve.get_deployment_handle(REPLICA, APPLICATION)
    return list(handle.broadcast(method, *arguments).results(timeout_s=CALL_S))


def kill_controller(options: HostOptions) -> None:
    """End Serve's controller; Ray restarts it."""
    import ray

    ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"), no_restart=False)


COMMANDS: dict[str, Callable[..., Any]] = {
    "status": status,
    "redeploy": redeploy,
    "call": call,
    "call_all": call_all,
    "kill_controller": kill_controller,
}


def main(argv: list[str]) -> int:
    """Serve until the input ends. The exit code: 1 where the application could not be served."""
    replies = _own_replies()
    options = HostOptions.model_validate_json(argv[0])
    import ray
    from ray import serve

    try:
        _start(options)
        _reply(replies, {"id": 0, "reply": "ready"})
        for line in sys.stdin:
            _reply(replies, _obey(options, json.loads(line)))
    except JobError as error:
        _reply(replies, {"id": 0, "error": str(error)})
        return 1
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
    return 0


def _own_replies() -> TextIO:
    """The standard output for replies alone: everything else that is printed goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _start(options: HostOptions) -> None:
    from ray import serve

    for name, value in SERVE_SETTINGS.items():
        os.environ.setdefault(name, value)
    init_ray(
        address="local",
        num_cpus=options.cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
        log_to_driver=False,
        **({"_temp_dir": options.temp_dir} if options.temp_dir else {}),
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": options.port})
    try:
        deploy(options)
    except RuntimeError as error:
        raise JobError(f"The application could not be served: {' '.join(str(error).split())}") from error


def _obey(options: HostOptions, command: dict[str, Any]) -> dict[str, Any]:
    number, name = command.pop("id"), command.pop("do")
    try:
        return {"id": number, "reply": COMMANDS[name](options, **command)}
    except Exception as error:  # whoever asked is told, and decides
        return {"id": number, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
