"""`blockcast chat` in a real pseudo-terminal, and with pipes, over the folder's real server."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api.conftest import Server
from tests.api.successor import ANSWER

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "actors.chat.command", "chat"]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Typist:
    """Whoever sits at the terminal: types, and reads until something stands there."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.screen = ""

    def type(self, keys: str) -> None:
        self.screen = ""
        os.write(self._terminal, keys.encode())

    def read_until(self, words: str) -> str:
        data = b""
        while words not in self.screen:
            data += os.read(self._terminal, 65536)  # raises OSError when the command has ended
            self.screen = CONTROL.sub("", data.decode(errors="replace"))
        return self.screen


@contextmanager
def chatting(server: Server, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Typist]]:
    mine, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    command = [*COMMAND, "--url", server.url, *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield process, Typist(mine)
    finally:
        process.kill()
        process.wait()
        os.close(mine)


def test_a_terminal_shows_the_canvas_filling_then_the_text_and_the_figures(server: Server) -> None:
    with chatting(server) as (process, typist):
        assert "successor" in typist.read_until("> ")
        typist.type("Hi\n")
        screen = typist.read_until("tokens per forward")
        assert "░" in screen, "the canvas was never seen"
        assert ANSWER in screen and "(diffusion)" in screen
        typist.read_until("> ")
        typist.type("/mode ar\n")
        typist.read_until("From now on: ar.")
        typist.read_until("> ")
        typist.type("And now?\n")
        screen = typist.read_until("tokens per forward")
        assert ANSWER in screen and "(ar)" in screen
        typist.read_until("> ")
        typist.type("/quit\n")
        assert process.wait(30) == 0


def test_a_refusal_does_not_end_a_conversation_at_a_terminal(server: Server) -> None:
    with chatting(server, "--max_tokens", "100000") as (process, typist):
        typist.read_until("> ")
        typist.type("Hi\n")
        typist.read_until("max_tokens 100000")
        typist.read_until("> ")
        typist.type("\x04")
        assert process.wait(30) == 0


def test_with_pipes_answers_are_plain_lines(server: Server, tmp_path: Path) -> None:
    command = [*COMMAND, "--url", server.url]
    done = subprocess.run(command, input="Hi\nAnd now?\n", capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n{ANSWER}\n")
    assert len(done.stderr.splitlines()) == 2 and "\x1b" not in done.stdout + done.stderr
    prompts = [int(tokens) for tokens in re.findall(r"a prompt of (\d+)", done.stderr)]
    assert prompts[1] > prompts[0] + len(ANSWER.encode()), "the second message came with the first answer"
