"""A job of a hundred short steps, for tests of signals, locks and continuing: each step appends a line to steps.txt."""

from __future__ import annotations

import sys
import time
from typing import Any

from pydantic import Field

from pipelines.jobkit import JobConfig, OutputFolder, Progress, main


class StandInConfig(JobConfig):
    """Count steps slowly."""

    steps: int = Field(100, ge=1, description="steps to count")
    pause_s: float = Field(0.02, ge=0, description="seconds a step takes", json_schema_extra={"identity": False})


def run(config: StandInConfig) -> dict[str, Any]:
    assert config.output is not None
    with OutputFolder(config.output, job="stand_in", config=config) as output:
        if output.finished is not None:
            return dict(output.finished["figures"])
        log = output.path / "steps.txt"
        done = len(log.read_text().splitlines()) if log.is_file() else 0
        with log.open("a") as file, Progress("stand_in", total=config.steps, unit="steps", already=done) as progress:
            for step in range(done, config.steps):
                time.sleep(config.pause_s)
                file.write(f"{step}\n")
                file.flush()
                progress.advance()
        with output.stage("result.txt") as path:
            path.write_text("counted\n")
        return dict(output.finish({"steps": config.steps})["figures"])


if __name__ == "__main__":
    sys.exit(main("stand_in", StandInConfig, run))
