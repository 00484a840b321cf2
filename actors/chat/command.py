"""The command: arguments, the conversation, and exit codes.

Exit codes: 0 done; 1 the server refused or failed; 2 bad usage; 130 interrupted while waiting for a message.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from actors.chat.answer import Answer
from actors.chat.client import Client
from actors.chat.view import CanvasView, printable
from model.errors import JobError, UserError

KEY_VARIABLE = "BLOCKCAST_API_KEY"
MODES = ("diffusion", "ar", "lossless", "auto")
PROMPT = "> "
FRAMES_PER_S = 15
HELP = """\
Talk to a served model and watch its canvas fill: masks open in any order, several in one forward.

In the conversation:
  /new         forget what was said so far
  /mode MODE   write in blocks (diffusion), token by token (ar), or as the server thinks best (auto)
  /quit        end (or Ctrl-D); Ctrl-C stops an answer
"""
EXAMPLES = f"""\
examples:
  make serve MODEL=out/demo/model PORT=8000                 a server, in another shell
  blockcast chat                                            talk to it
  blockcast chat --mode ar                                  the same weights, token by token
  {KEY_VARIABLE}=... blockcast chat --url https://models.example.org/v1
  blockcast chat < questions.txt > answers.txt              a message a line; figures go to stderr
"""


@dataclass
class Conversation:
    """What was said to one model, and how it is asked. mode and threshold: None leaves them to the server."""

    client: Client
    model: str
    mode: str | None = None
    max_tokens: int | None = None
    threshold: float | None = None
    opening: list[dict[str, str]] = field(default_factory=list)
    turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, message: str, answer: Answer) -> None:
        """Send a message and follow its answer into `answer`. Raises JobError.

        Whatever was answered is kept, even if it was interrupted; a message without any answer is forgotten.
        """
        said = {"role": "user", "content": message}
        try:
            for event in self.client.stream("chat/completions", self._body(said)):
                answer.take(event)
        finally:
            if answer.text:
                self.turns += [said, {"role": "assistant", "content": answer.text}]

    def _body(self, said: Mapping[str, str]) -> dict[str, Any]:
        chosen = {"mode": self.mode, "threshold": self.threshold, "trace": True}
        return {
            "model": self.model,
            "messages": [*self.opening, *self.turns, said],
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "diffusion": {name: value for name, value in chosen.items() if value is not None},
        }


class Terminal:
    """Where the conversation happens: answers on stdout, everything else beside them on stderr."""

    def __init__(self) -> None:
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)
        self.interactive = sys.stdin.isatty()

    def messages(self) -> Iterator[str]:
        """What is typed, or piped in, a line at a time."""
        while True:
            try:
                line = input(PROMPT) if self.interactive else next(sys.stdin)
            except (EOFError, StopIteration):
                return
            except UnicodeDecodeError as error:
                raise UserError("Standard input is not UTF-8 text.") from error
            if line.strip():
                yield line.strip()

    def show(self, conversation: Conversation, message: str) -> None:
        """One message and its answer: the live canvas on a terminal, then the final text and the figures."""
        answer = Answer()
        try:
            with self._watching(answer):
                conversation.ask(message, answer)
        finally:
            if answer.text or answer.figures:
                self._print(answer.text)
        self.note(answer.summary)

    def _watching(self, answer: Answer) -> contextlib.AbstractContextManager[object]:
        if not self.out.is_terminal:
            return contextlib.nullcontext()
        return Live(CanvasView(answer), console=self.out, transient=True, refresh_per_second=FRAMES_PER_S)

    def _print(self, text: str) -> None:
        if self.out.is_terminal:
            self.out.print(Text(printable(text)), soft_wrap=True)
        else:
            print(text, flush=True)

    def note(self, sentence: str, style: str = "dim") -> None:
        if sentence:
            self.err.print(Text(printable(sentence), style if self.err.is_terminal else ""), soft_wrap=True)


# ------------------------------------------------------------------------------------------------- the conversation
def chat(arguments: argparse.Namespace) -> None:
    """The whole conversation. Raises UserError, JobError, KeyboardInterrupt."""
    client = Client(arguments.url, arguments.key or os.environ.get(KEY_VARIABLE))
    model = arguments.model or client.models()[0]["id"]
    conversation = Conversation(client, model, arguments.mode, arguments.max_tokens, arguments.threshold)
    if arguments.system:
        conversation.opening.append({"role": "system", "content": arguments.system})
    terminal = Terminal()
    if terminal.interactive:
        import readline  # noqa: F401  (line editing and history for input())

        terminal.note(f"{model} at {client.url}. /new forgets, /mode changes how it writes, /quit ends.")
    for message in terminal.messages():
        if message == "/quit":
            return
        if message.startswith("/") and terminal.interactive:
            terminal.note(order(conversation, message))
        else:
            _turn(conversation, terminal, message)


def _turn(conversation: Conversation, terminal: Terminal, message: str) -> None:
    """One message. At a terminal neither a refusal nor Ctrl-C ends the conversation."""
    try:
        terminal.show(conversation, message)
    except JobError as error:
        if not terminal.interactive:
            raise
        terminal.note(str(error), "red")
    except KeyboardInterrupt:
        if not terminal.interactive:
            raise
        terminal.note("Stopped.")


def order(conversation: Conversation, message: str) -> str:
    """Carry out what begins with a slash; returns what to say about it."""
    name, _, value = message.partition(" ")
    if name == "/new":
        conversation.turns.clear()
        return "What was said is forgotten."
    if name == "/mode" and value in MODES:
        conversation.mode = value
        return f"From now on: {value}."
    return f"{message!r} is none of /new, /mode {'|'.join(MODES)} and /quit."


# ------------------------------------------------------------------------------------------------- the command line
def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        chat(arguments)
    except UserError as error:
        return _fail(str(error), 2)
    except JobError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:  # whoever read the answers has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _fail(message: str, code: int) -> int:
    print(f"blockcast chat: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    return code


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="blockcast", description="Blockcast's commands for a served model.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser(
        "chat",
        help="talk to a served model and watch its canvas fill",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="the server's API (default %(default)s)")
    add("--key", help=f"API key; better in the environment as {KEY_VARIABLE}, where other users cannot read it")
    add("--model", help="a served model (default: the first that the server lists)")
    add("--mode", choices=MODES, help="how it writes (default: as the server is set)")
    add("--system", help="a system message before the conversation")
    add("--max_tokens", type=int, help="tokens of an answer at most (default: what fits the context)")
    add("--threshold", type=float, help="certainty that opens a token, above 0 to 1 (default: as the server is set)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
