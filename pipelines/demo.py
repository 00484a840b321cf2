"""The whole chain on this machine: adapt a real small model, assess it, serve it, ask it one question.

    python pipelines/demo.py                    # or: make demo
    python pipelines/demo.py --output out/mine --train.steps 300

Runs pipelines/adapt.py (every further argument goes to it), serves the result on a free loopback port, asks one
held-out question with the openai client, and says what this much adaptation bought. Run it again and it goes on from
where it stopped; a finished demo only asks again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from model.errors import JobError

HERE = Path(__file__).resolve().parent
READY = "serve: ready:"
READY_S = 300.0
QUESTION_SEED = 7


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code of the step that ended it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return run(argv)
    except JobError as error:
        print(f"demo: {error}", file=sys.stderr, flush=True)
        return 1
    except Interrupted as interrupted:
        print("demo: interrupted; run the same command again to go on.", file=sys.stderr, flush=True)
        return 128 + interrupted.number


def run(argv: Sequence[str]) -> int:
    """Adapt, serve, ask, sum up."""
    words = list(argv)
    if "--help" in words or "-h" in words:
        print(__doc__)
        return 0
    output = _output(words)
    if not any(w == "--output" or w.startswith("--output=") for w in words):
        words += ["--output", str(output)]
    code = _child([sys.executable, str(HERE / "adapt.py"), *words])
    if code or "--dry-run" in words:
        return code
    print("\ndemo: serving the adapted model", flush=True)
    with served(output / "model") as base_url:
        ask(base_url)
    print(summary(output), flush=True)
    return 0


def _output(words: Sequence[str]) -> Path:
    """Where adapt will write: --output, else `demo` under BLOCKCAST_STORAGE or ./out."""
    for index, word in enumerate(words):
        if word == "--output" and index + 1 < len(words):
            return Path(words[index + 1])
        if word.startswith("--output="):
            return Path(word.partition("=")[2])
    return Path(os.environ.get("BLOCKCAST_STORAGE") or "out") / "demo"


def _child(command: Sequence[str]) -> int:
    """Run a step in the foreground. It gets the terminal's signals itself; ours are passed on when it did not."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except Interrupted as interrupted:
        process.send_signal(interrupted.number)
        process.wait()
        raise


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The model behind HTTP on a free loopback port, for the duration; yields the base URL of its API."""
    port = _free_port()
    command = [sys.executable, "-m", "actors.serve_local", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _wait_until_ready(process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Pass on what the server prints until it is ready; raises JobError when it ends or takes too long."""
    assert process.stdout is not None
    late = threading.Timer(READY_S, process.terminate)
    late.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(READY):
                return
    finally:
        late.cancel()
    raise JobError(f"The model was not served (exit code {process.wait()}): see the lines above.")


def ask(base_url: str) -> None:
    """One held-out task over HTTP, with the decoding figures that came with the answer."""
    from openai import OpenAI

    from pipelines.tasks import generate

    task = next(iter(generate("held_out", 1, QUESTION_SEED)))
    client = OpenAI(base_url=base_url, api_key="none")
    name = client.models.list().data[0].id
    messages: Any = list(task.messages)
    answer = client.chat.completions.create(model=name, messages=messages, max_tokens=96)
    text = answer.choices[0].message.content or ""
    print(f"\n  question  {messages[-1]['content']}")
    print("  answer    " + text.replace("\n", "\n            "))
    verdict = "right" if task.check(text) else "wrong"
    print(f"  checker   {verdict}; the worked answer ends: {task.answer.splitlines()[-1]}")
    print(f"  decoding  {decoding_line(answer.to_dict())}\n", flush=True)


def decoding_line(answer: Mapping[str, Any]) -> str:
    """The figures of one answer in a line."""
    figures, usage = answer["diffusion"], answer["usage"]
    forwards = figures["forwards"]
    return (
        f"{usage['completion_tokens']} tokens in {forwards['denoise']} denoising and {forwards['commit']} commit "
        "forwards, "
        f"{figures['tokens_per_forward']:.2f} tokens per forward; steps per block {figures['steps_per_block']}"
    )


def summary(output: Path) -> str:
    """What this much adaptation bought, from the manifests, and how to go further."""
    trained = _figures(output)
    lines = [
        f"demo: {trained['steps']} steps on {trained['supervised_tokens']:,} supervised tokens; "
        f"training loss {trained['first_loss']:.2f} -> {trained['last_loss']:.2f} nats a token.",
    ]
    if (output / "assess" / "manifest.json").is_file():
        lines += [f"demo: {line}" for line in bought(_figures(output / "assess"))]
    lines += [
        f"demo: the report is {output / 'assess' / 'report.md'}, the curve {output / 'loss.png'}.",
        f"demo: serve it again:   make serve MODEL={output / 'model'} PORT=8000",
        "demo: your own model:   .venv/bin/python pipelines/adapt.py --model FOLDER_OR_ID --data chats.jsonl",
        "demo: the published recipe, on a cluster:   ray up cluster.yaml   (README, 'On a cluster')",
    ]
    return "\n".join(lines)


def _figures(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    figures: dict[str, Any] = manifest["figures"]
    return figures


def bought(figures: Mapping[str, Any]) -> list[str]:
    """The honest comparison: each contender's accuracy and speed, and speed against the adapted model's own AR mode."""
    rows = figures["contenders"]
    own_ar = next((row for row in rows if row["contender"] == "adapted, AR"), None)
    lines = []
    for row in rows:
        ratio = ""
        if own_ar and row["contender"].startswith("adapted, blocks"):
            ratio = f", {row['tokens_per_second'] / own_ar['tokens_per_second']:.2f}x its own AR mode"
        accuracy = "not judged" if row["accuracy"] is None else f"{100 * row['accuracy']:.0f}% right"
        lines.append(
            f"{row['contender']}: {accuracy}, {row['tokens_per_second']:.1f} tokens/s, "
            f"{row['tokens_per_forward']:.2f} tokens per forward{ratio}"
        )
    return lines


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
