"""Just enough of a Dockerfile's grammar: its instructions, in order, with continuation lines joined."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """`keyword` in capitals, the rest of the line, and the stage it belongs to ('' before the first FROM)."""

    keyword: str
    rest: str
    stage: str


def read_dockerfile(path: Path) -> list[Instruction]:
    """Every instruction; comments are left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    instructions: list[Instruction] = []
    stage = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            keyword, _, rest = line.strip().partition(" ")
            if keyword.upper() == "FROM":
                stage = rest.split(" AS ")[1].strip()
            instructions.append(Instruction(keyword.upper(), " ".join(rest.split()), stage))
    return instructions


def user_of(path: Path) -> tuple[int, int]:
    """uid and gid of the last USER."""
    last = [i.rest for i in read_dockerfile(path) if i.keyword == "USER"][-1]
    uid, gid = last.split(":")
    return int(uid), int(gid)


def is_sent(ignore: Path, name: str) -> bool:
    """Whether .dockerignore lets `name` (a file or folder at the root) into the build's context; the last rule wins."""
    sent = True
    for line in ignore.read_text(encoding="utf-8").splitlines():
        rule = line.strip().rstrip("/")
        if rule and not rule.startswith("#"):
            keep = rule.startswith("!")
            if fnmatch(name, rule.removeprefix("!")):
                sent = keep
    return sent
