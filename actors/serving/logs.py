"""Where our own log lines go inside Serve: into the replica's log file, as JSON or as text.

Serve gives its handlers to the logger "ray.serve" alone; the engine's loggers ("actors", "model") know no Serve, so
their lines are passed on.
"""

from __future__ import annotations

import logging
from typing import Literal

from ray.serve.schema import LoggingConfig

LogFormat = Literal["json", "text"]
OURS = ("actors", "model")


def logging_config(log_format: LogFormat) -> LoggingConfig:
    """Of a deployment. Serve's own access log stays: method, route, status and time, no body."""
    return LoggingConfig(encoding="JSON" if log_format == "json" else "TEXT")


class _ToServe(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("ray.serve").handle(record)


def join_serve_log() -> None:
    """Pass the lines of our own loggers on to this replica's log file; once is enough."""
    for name in OURS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _ToServe) for handler in logger.handlers):
            logger.addHandler(_ToServe())
            logger.propagate = False
