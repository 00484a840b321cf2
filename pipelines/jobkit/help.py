"""The text of `--help`: the job's purpose, then every key with its type, its meaning and unit, its default."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from pydantic import BaseModel

from pipelines.jobkit.keys import Key, list_keys, section_paths

COMMON = (
    ("--config FILE.yaml", "read keys from this file first; the command line wins over it"),
    ("--dry-run", "print the resolved configuration and the resource plan, and stop"),
    ("--help", "print this"),
)
ENDING = (
    "A key may also be written --key=value; a key that takes several values takes them after one --key or several. "
    "null leaves an optional key unset. Started without arguments, the job reads the YAML file that BLOCKCAST_CONFIG "
    "names. Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 130 or 143 interrupted (run the same command again "
    "to go on)."
)


def default_text(value: Any) -> str:
    """A default as one would write it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return " ".join(str(item) for item in value) or "none"
    return str(value)


def _entry(head: str, text: str, width: int) -> list[str]:
    return [f"  {head}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _key_entry(key: Key, width: int) -> list[str]:
    ending = "required" if key.required else f"default: {default_text(key.default)}"
    return _entry(f"--{key.path} {key.type_name}", f"{key.description} ({ending})", width)


def help_text(job: str, purpose: str, config_type: type[BaseModel]) -> str:
    """What `python pipelines/<job>.py --help` prints."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    script, _, first = job.partition(" ")
    lines = [
        f"usage: python pipelines/{script}.py {f'{first} ' if first else ''}[--config FILE.yaml] [--key value ...]",
        "",
    ]
    lines += [*textwrap.wrap(purpose, width), ""]
    for head, text in COMMON:
        lines += _entry(head, text, width)
    purposes = {path: " ".join((section.__doc__ or "").split()) for path, section in section_paths(config_type)}
    group = ""
    lines += ["", "keys:"]
    for key in list_keys(config_type):
        prefix = key.path.rpartition(".")[0]
        if prefix != group:
            group = prefix
            lines += ["", f"{prefix}: {purposes[prefix]}"]
        lines += _key_entry(key, width)
    return "\n".join([*lines, "", *textwrap.wrap(ENDING, width)])
