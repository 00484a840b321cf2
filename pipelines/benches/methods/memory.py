"""What one contender needs in memory: a fresh process loads its model and answers some questions.

python -m pipelines.benches.methods.memory '{"role": ..., "source": ..., "decode": {...}, ...}'
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from model.config import DecodeConfig
from model.errors import JobError
from pipelines.assessment.contenders import Contender, subject_of
from pipelines.assessment.measuring import Settings, make_players
from pipelines.assessment.questions import task_questions
from pipelines.benches.memory import peak_bytes, resident_bytes

LIMIT_S = 600
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # glibc: what is freed is no longer resident
RESULT = "memory: "


@dataclass(frozen=True)
class Memory:
    """Bytes of resident memory beyond a process with all libraries: with the model loaded, and at the answers' peak."""

    loaded: int
    peak: int


def memory_of(
    contender: Contender, settings: Settings, *, tasks: int, max_tokens: int, kinds: Sequence[str] = ()
) -> Memory:
    """Measure a contender in a process of its own, on so many tasks. Raises JobError where that fails."""
    told = {
        "label": contender.label,
        "role": contender.subject.role,
        "source": contender.subject.source,
        "decode": asdict(contender.decode),
        "settings": asdict(settings),
        "tasks": tasks,
        "max_tokens": max_tokens,
        "kinds": list(kinds),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.benches.methods.memory", json.dumps(told)],
        env={**os.environ, **GIVES_BACK},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    lines = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        said = (done.stderr.strip() or "no output").splitlines()[-1]
        raise JobError(f"The memory of {contender.label} could not be measured: {said}")
    return Memory(**json.loads(lines[-1]))


def main(told: dict[str, Any]) -> None:
    """Measure what is told, print one line of JSON."""
    settings, decode = Settings(**told["settings"]), DecodeConfig(**told["decode"])
    questions = task_questions(told["tasks"], settings.seed, told["max_tokens"], told["kinds"])
    contender = Contender(told["label"], subject_of(told["role"], told["source"], decode.mode), decode)
    before = resident_bytes()
    player = make_players([contender], questions, settings)[contender.label]
    gc.collect()
    loaded = resident_bytes()
    growth = peak_bytes(lambda: player.turn(questions), settings.device)
    print(RESULT + json.dumps(asdict(Memory(loaded - before, loaded - before + growth))), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
