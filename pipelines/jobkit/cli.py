"""The entry of every job: arguments to a configuration, the configuration to run(), what happened to an exit code.

    if __name__ == "__main__":
        sys.exit(main("prepare", PrepareConfig, run, plan))

Exit codes: 0 done; 1 the job failed; 2 bad usage or bad input; 130 and 143 interrupted by SIGINT and SIGTERM, after
which the same command goes on. A UserError or a JobError ends as one sentence on stderr; any other exception is a
defect of the project and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from model.errors import JobError, UserError
from pipelines.jobkit.cluster import cause_of
from pipelines.jobkit.help import help_text
from pipelines.jobkit.identity import config_hash
from pipelines.jobkit.output import DISK_FULL
from pipelines.jobkit.resolve import Settings, build, settings_of_file, settings_of_words, settle_places
from pipelines.jobkit.sections import JobConfig
from pipelines.jobkit.signals import Terminated, install_signals

ConfigT = TypeVar("ConfigT", bound=JobConfig)


@dataclass
class Arguments:
    """A command line taken apart, values still text."""

    config: str | None = None
    dry_run: bool = False
    help: bool = False
    words: dict[str, list[str]] = field(default_factory=dict)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Split `--key value...`, `--key=value`, `--config FILE`, `--dry-run`, `--help`; a stray word is a UserError."""
    arguments = Arguments()
    name: str | None = None
    for word in argv:
        if word in ("--help", "-h"):
            arguments.help = True
        elif word == "--dry-run":
            arguments.dry_run, name = True, None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            arguments.words.setdefault(name, []).extend([value] if equals else [])
            name = None if equals else name
        elif name is None:
            raise UserError(f"{word!r} belongs to no key: write --key value, and see --help for the keys.")
        else:
            arguments.words[name].append(word)
    config = arguments.words.pop("config", None)
    if config is not None and len(config) != 1:
        raise UserError("--config takes exactly one YAML file.")
    arguments.config = config[0] if config else None
    return arguments


def load_config(job: str, config_type: type[ConfigT], arguments: Arguments) -> ConfigT:
    """The validated configuration: class defaults, then the file, then the command line."""
    file = arguments.config
    from_environment = os.environ.get("BLOCKCAST_CONFIG")
    if file is None and from_environment:
        if arguments.words:
            print(
                f"{job}: BLOCKCAST_CONFIG ({from_environment}) is not read, because arguments are given; "
                f"--config {from_environment} adds it.",
                file=sys.stderr,
            )
        else:
            file = from_environment
    file_settings = settings_of_file(file, config_type) if file else Settings()
    config = build(config_type, file_settings, settings_of_words(arguments.words, config_type))
    return settle_places(config, job)  # type: ignore[return-value]


def dry_run_text(job: str, config: JobConfig, plan: Mapping[str, Any]) -> str:
    """What --dry-run prints: a YAML document with job, config, config_hash and plan."""
    document = {
        "job": job,
        "config": config.model_dump(mode="json"),
        "config_hash": config_hash(config),
        "plan": dict(plan),
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120).rstrip()


def _fail(job: str, message: str, code: int) -> int:
    shown = "".join(
        c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split())
    )  # files may say anything
    print(f"{job}: {shown}", file=sys.stderr, flush=True)
    return code


def _start(
    job: str,
    config_type: type[ConfigT],
    run: Callable[[ConfigT], Mapping[str, Any]],
    plan: Callable[[ConfigT], Mapping[str, Any]] | None,
    argv: Sequence[str],
) -> int:
    arguments = parse_arguments(argv)
    if arguments.help:
        print(help_text(job, _purpose(config_type), config_type))
        return 0
    config = load_config(job, config_type, arguments)
    if arguments.dry_run:
        print(dry_run_text(job, config, plan(config) if plan else {}))
        return 0
    run(config)
    return 0


def _purpose(config_type: type[JobConfig]) -> str:
    return " ".join((config_type.__doc__ or "").split())


def _signal_of(error: KeyboardInterrupt | SystemExit) -> int:
    """Which signal an interruption was. No job calls sys.exit: a SystemExit is the work of Ray's own signal handlers
    (Ray Train ends with sys.exit(0) on SIGINT, ray.init's handler with the signal's number on SIGTERM)."""
    terminated = isinstance(error, Terminated) or (isinstance(error, SystemExit) and error.code == signal.SIGTERM)
    return signal.SIGTERM if terminated else signal.SIGINT


def exit_code_of(job: str, error: BaseException) -> int | None:
    """Report an expected ending on stderr and give its exit code; None for a defect, whose traceback must be seen."""
    error = cause_of(error)
    if isinstance(error, UserError):
        return _fail(job, str(error), 2)
    if isinstance(error, JobError):
        return _fail(job, str(error), 1)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return _fail(job, "interrupted; run the same command again to go on.", 128 + _signal_of(error))
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        place = f" for {error.filename}" if error.filename else ""
        return _fail(job, f"No space left{place}: free some and run the same command again to go on.", 1)
    return None


def main(
    job: str,
    config_type: type[ConfigT],
    run: Callable[[ConfigT], Mapping[str, Any]],
    plan: Callable[[ConfigT], Mapping[str, Any]] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a job from its command line and give the exit code.

    job: the script's name, with bench's first word behind it. config_type's docstring is the purpose that --help shows.
    run: does the work and returns its figures. plan: what --dry-run prints beside the configuration; starts nothing.
    """
    install_signals()
    try:
        return _start(job, config_type, run, plan, sys.argv[1:] if argv is None else argv)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        code = exit_code_of(job, error)
        if code is None:
            raise
        return code
