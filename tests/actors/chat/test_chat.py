"""`blockcast chat` over a listening gateway: the conversation it keeps, what it prints, and how it fails."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import pytest

from actors.chat.answer import Answer, token_data
from actors.chat.client import Client, Event
from actors.chat.command import Conversation, main, order
from actors.chat.view import MASK, NEW, canvas_text, printable
from actors.engine.events import Delta, Failed
from actors.engine.events import Event as EngineEvent
from actors.gateway.access import load_key_hashes
from model.decoding import GenerationRequest
from model.errors import JobError, UserError
from tests.actors.gateway.test_gateway import GOOD, ScriptedBackend
from tests.live_gateway import listening
from tests.tiny import tiny_tokenizer

Run = Callable[..., tuple[int, str, str]]


class RecordingBackend(ScriptedBackend):
    """Also keeps the prompts that it was sent, as text."""

    def __init__(self, script: list[Any]) -> None:
        super().__init__(script)
        self.prompts: list[str] = []

    async def generate(
        self, requests: Sequence[GenerationRequest], traceparent: str | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        self.prompts.append(str(tiny_tokenizer().decode(requests[0].prompt_ids)))
        async for event in super().generate(requests, traceparent):
            yield event


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """main() with lines on standard input: exit code, standard output, standard error."""

    def call(*arguments: str, lines: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        code = main(["chat", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    monkeypatch.delenv("BLOCKCAST_API_KEY", raising=False)
    yield call


def test_piped_lines_are_one_conversation_with_answers_on_stdout_and_figures_on_stderr(run: Run) -> None:
    backend = RecordingBackend(GOOD)
    with listening(backend) as address:
        code, out, err = run("--url", f"{address}/v1", "--system", "Be brief.", lines="Hi\n\nAnd now?\n")
    assert (code, out) == (0, "ab\nab\n")
    assert err.count("3 tokens after a prompt of 2, 3 forwards (diffusion), 1.00 tokens per forward") == 2
    first, second = backend.prompts
    assert "Be brief." in first and "Hi" in first and "And now?" not in first
    assert second.index("Be brief.") < second.index("Hi") < second.index("ab") < second.index("And now?")


def test_the_address_may_be_the_server_alone(run: Run) -> None:
    with listening(ScriptedBackend(GOOD)) as address:
        assert run("--url", address, lines="Hi\n")[:2] == (0, "ab\n")


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ([UserError("The prompt is too long.")], "The prompt is too long."),
        ([Failed("x", "It broke.")], "It broke."),
        ([Delta("x", (5,), "a"), Failed("x", "It broke later.")], "It broke later."),
    ],
)
def test_what_the_server_refuses_is_one_sentence_and_exit_1(run: Run, script: list[Any], sentence: str) -> None:
    with listening(ScriptedBackend(script)) as address:
        code, _, err = run("--url", address, lines="Hi\nNever asked\n")
    assert (code, err) == (1, f"blockcast chat: {sentence}\n")


def test_a_server_that_is_not_there_is_one_sentence_and_exit_1(run: Run) -> None:
    code, out, err = run("--url", "http://127.0.0.1:1/v1", lines="Hi\n")
    assert (code, out) == (1, "")
    assert (
        err == "blockcast chat: Nothing answers at http://127.0.0.1:1/v1: is the server running, and is --url right?\n"
    )


def test_what_is_no_address_is_exit_2(run: Run) -> None:
    for url in ("localhost:8000", "ftp://host/v1", "http://", ""):
        code, _, err = run("--url", url)
        assert code == 2 and err.startswith("blockcast chat: ") and err.count("\n") == 1


def test_a_key_comes_from_the_command_line_or_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = load_key_hashes(None, {"BLOCKCAST_API_KEYS": "secret"})
    with listening(ScriptedBackend(GOOD), keys=keys) as address:
        code, _, err = run("--url", address, lines="Hi\n")
        assert code == 1 and "API key" in err and err.count("\n") == 1
        assert run("--url", address, "--key", "secret", lines="Hi\n")[0] == 0
        monkeypatch.setenv("BLOCKCAST_API_KEY", "secret")
        assert run("--url", address, lines="Hi\n")[0] == 0


def test_another_model_and_another_mode_are_the_servers_to_refuse(run: Run) -> None:
    with listening(ScriptedBackend(GOOD)) as address:
        code, _, err = run("--url", address, "--model", "other", lines="Hi\n")
        assert code == 1 and "There is no model 'other'" in err
        code, _, err = run("--url", address, "--mode", "ar", "--threshold", "0.5", lines="Hi\n")
        assert code == 1 and "diffusion.threshold has no effect" in err


def test_a_message_without_an_answer_is_forgotten_and_a_broken_answer_is_kept() -> None:
    backend = ScriptedBackend([Failed("x", "It broke.")])
    with listening(backend) as address:
        conversation = Conversation(Client(address), "tiny")
        with pytest.raises(JobError):
            conversation.ask("Hi", Answer())
        assert conversation.turns == []
        backend.script = [Delta("x", (5,), "a"), Failed("x", "It broke.")]
        with pytest.raises(JobError):
            conversation.ask("Hi", Answer())
    assert conversation.turns == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]


def test_orders_change_the_conversation_and_an_unknown_one_is_explained() -> None:
    conversation = Conversation(Client("http://127.0.0.1:1"), "tiny", turns=[{"role": "user", "content": "Hi"}])
    order(conversation, "/mode ar")
    order(conversation, "/new")
    assert conversation.mode == "ar" and conversation.turns == []
    assert "/mode diffusion|ar|lossless|auto" in order(conversation, "/mode fast")
    assert conversation.mode == "ar"


# ------------------------------------------------------------------------------------------------- the canvas
def canvas_event(start: int, reveals: dict[int, str]) -> Event:
    cells = [{"position": p, "token_id": 1, "confidence": 0.9, "text": text} for p, text in reveals.items()]
    shape = {"prompt_tokens": 5, "block_size": 4, "sub_block_size": 4, "block_start": start}
    return Event("canvas", {**shape, "reveals": cells})


def test_the_canvas_shows_masks_and_whole_characters_and_marks_the_newest_tokens() -> None:
    answer = Answer()
    answer.take(canvas_event(4, {7: "bytes:\\xa9", 5: "a"}))
    assert canvas_text(answer).plain == f"a{MASK}\ufffd"
    answer.take(canvas_event(4, {6: "bytes:\\xc3"}))
    shown = canvas_text(answer)
    assert shown.plain == "aé"
    answer.take(canvas_event(8, {10: "z"}))
    shown = canvas_text(answer)
    assert shown.plain == f"aé{MASK * 2}z{MASK}"
    assert [shown.plain[span.start : span.end] for span in shown.spans if span.style == NEW] == ["z"]


def test_a_models_text_cannot_steer_the_terminal_nor_be_markup() -> None:
    assert printable("a\x1b[2J\x07\n\tb\x9b") == "a\\x1b[2J\\x07\n\tb\\x9b"
    answer = Answer()
    answer.take(canvas_event(4, {5: "[red]\x1b]0;title\x07"}))
    assert canvas_text(answer).plain.startswith("[red]\\x1b]0;title\\x07")


def test_a_token_is_its_text_or_the_bytes_that_the_server_spells() -> None:
    assert token_data("bytes:\\xf0\\x9f") == b"\xf0\x9f"
    assert token_data("bytes:") == b"bytes:"
    assert token_data("é") == "é".encode()
