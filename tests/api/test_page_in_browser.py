"""The page in a real headless Chromium: over the folder's real server, and over scripts for what it never does."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from actors.engine.events import Canvas, Delta, Finished
from actors.gateway.access import load_key_hashes
from actors.gateway.backend import Served
from model.config import DecodeConfig
from model.decoding import GenerationResult, Reveal
from model.errors import JobError
from tests.actors.gateway.test_gateway import ScriptedBackend
from tests.actors.protocol.test_protocol import AR_CARD
from tests.api.conftest import MODEL, Server
from tests.api.successor import ANSWER, letters_after
from tests.live_gateway import listening
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.slow
ANSWER_TOKENS = len(ANSWER.encode()) + 1
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing that looks for hosts outside; the sandbox cannot be had as root.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE = {"viewport": {"width": 375, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
WATCH = """() => {
  window.seen = [];
  const look = () => seen.push(["masked", "not(.masked)"].map((what, i) =>
    document.querySelectorAll(`#blocks .cell${i ? ":" : "."}${what}`).length));
  new MutationObserver(look).observe(document.querySelector("#blocks .canvas"), { subtree: true, childList: true });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, driven by Playwright; skipped where there is none."""
    path = os.environ.get("BLOCKCAST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is found: `apt-get install chromium`, or name one with BLOCKCAST_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@dataclasses.dataclass
class Visit:
    """An open page, and what went wrong in it or left for another address."""

    page: Page
    address: str
    complaints: list[str]

    def pane(self, name: str) -> Locator:
        return self.page.locator(f"#{name}")

    def figure(self, pane: str, name: str) -> str:
        return self.pane(pane).locator(f"[data-figure={name}]").inner_text()

    def ask(self, prompt: str, **settings: Any) -> None:
        """Type a prompt and write, by keyboard; settings by their field's id."""
        from playwright.sync_api import expect

        page = self.page
        expect(page.get_by_role("button", name="Write", exact=True)).to_be_enabled()
        if settings:
            page.locator("#settings").evaluate("it => it.open = true")
        for name, value in settings.items():
            field = page.locator(f"#{name}")
            field.set_checked(value) if isinstance(value, bool) else field.fill(str(value))
        page.get_by_label("Prompt", exact=True).fill(prompt)
        page.get_by_label("Prompt", exact=True).press("Control+Enter")

    def until_status(self, words: str) -> None:
        from playwright.sync_api import expect

        expect(self.page.get_by_role("status")).to_contain_text(words, timeout=60_000)

    def until_problem(self, words: str) -> None:
        from playwright.sync_api import expect

        expect(self.page.get_by_role("alert")).to_contain_text(words, timeout=60_000)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Any]:
    """Opens a page at an address. At the end its console must be empty, and nothing asked of another address."""
    contexts, visits = [], []

    def opened(address: str, **options: Any) -> Visit:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        found = Visit(page, address, [])
        visits.append(found)
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("console", lambda message: found.complaints.append(message.text) if message.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith(address) else found.complaints.append(r.url))
        page.goto(f"{address}/")
        return found

    yield opened
    for context in contexts:
        context.close()
    for one in visits:
        assert one.complaints == []


def asked(server: Server, mode: str) -> dict[str, Any]:
    """What the API itself says of the chat that the page sends."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "diffusion": {"mode": mode}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    return dict(answer.json())


@pytest.mark.parametrize("in_turn", [False, True])
def test_both_ways_of_writing_fill_side_by_side_with_the_apis_own_figures(
    visit: Any, server: Server, in_turn: bool
) -> None:
    here = visit(server.url)
    here.page.evaluate(WATCH)
    here.ask("Hello", in_turn=in_turn)
    here.until_status("Done")
    seen = here.page.evaluate("seen")
    assert any(masked and opened for masked, opened in seen), "the canvas was never partly open"
    for pane, mode in (("blocks", "diffusion"), ("ar", "ar")):
        api = asked(server, mode)
        forwards = api["diffusion"]["forwards"]["denoise"] + api["diffusion"]["forwards"]["commit"]
        assert here.pane(pane).locator("pre").text_content() == ANSWER
        assert ANSWER in here.pane(pane).locator(".canvas").inner_text(), "bytes of a character stand together"
        assert here.figure(pane, "tokens") == str(ANSWER_TOKENS)
        assert here.figure(pane, "forwards") == str(forwards)
        assert here.figure(pane, "per_forward") == f"{api['diffusion']['tokens_per_forward']:.2f}"
        assert float(here.figure(pane, "speed")) > 0
    status = here.page.get_by_role("status").inner_text()
    assert ("Tokens/s of blocks over token by token" in status) == in_turn, (
        "speeds are compared only where neither slowed the other"
    )


def test_the_timeline_shows_which_position_opened_at_which_forward_and_the_slider_looks_back(
    visit: Any, server: Server
) -> None:
    here = visit(server.url)
    here.ask("Hello")
    here.until_status("Done")
    places = {}
    for pane in ("blocks", "ar"):
        marks = here.pane(pane).locator("svg rect")
        box = "them => them.map(r => [r.x.baseVal.value, r.y.baseVal.value])"
        places[pane] = sorted(map(tuple, marks.evaluate_all(box)))
        assert len(places[pane]) == here.pane(pane).locator(".cell:not(.masked)").count() >= ANSWER_TOKENS
    assert places["ar"] == [(i, i) for i in range(ANSWER_TOKENS)], "token by token is the diagonal"
    assert [x for x, _ in places["blocks"]] == list(range(len(places["blocks"])))
    slider = here.pane("blocks").get_by_role("slider")
    slider.press("Home")
    assert here.pane("blocks").locator(".cell:not(.masked)").count() == 0
    slider.press("ArrowRight")
    assert here.pane("blocks").locator(".moment").inner_text().startswith("forward 1 of ")
    first = [x for x, y in places["blocks"] if y == 0]
    assert here.pane("blocks").locator(".cell:not(.masked)").count() == len(first)
    slider.press("End")
    assert here.pane("blocks").locator(".cell:not(.masked)").count() == len(places["blocks"])


def test_a_prompt_can_go_without_the_chat_template(visit: Any, server: Server) -> None:
    here = visit(server.url)
    here.ask("a", plain=True, max_tokens=10)
    here.until_status("Done")
    assert here.pane("blocks").locator("pre").text_content() == letters_after("a", 10)


def test_a_refusal_is_the_servers_own_sentence_and_the_next_question_is_answered(visit: Any, server: Server) -> None:
    here = visit(server.url)
    here.ask("Hello", max_tokens=5000)
    here.until_problem("max_tokens 5000")
    here.complaints.clear()  # Chromium's console tells of the 400
    here.ask("Hello", max_tokens=50)
    here.until_status("Done")
    assert here.page.get_by_role("alert").count() == 0


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_on_a_phone_everything_fits_and_can_be_touched(visit: Any, server: Server, colours: str) -> None:
    here = visit(server.url, color_scheme=colours, **PHONE)
    here.ask("Hello")
    here.until_status("Done")
    page = here.page
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    boxes = [here.pane(pane).bounding_box() for pane in ("blocks", "ar")]
    assert boxes[0] and boxes[1] and boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"], (
        "panes stand one below another"
    )
    for name in ("Write", "Stop"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box and box["height"] >= 44
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) > 3 * 128
    assert light == (colours == "light")


# ------------------------------------------------------------------------------------------------- scripts
def spelling(text: str) -> list[Any]:
    """A script whose answer is `text`, opened from its end to its beginning."""
    ids = tiny_tokenizer()(text).input_ids
    reveals = [Reveal(16 + i, token, 0.9) for i, token in enumerate(ids)]
    end = -(-len(ids) // 8) * 8
    canvases = [Canvas("x", 16, (r,), block_size=end, sub_block_size=4, prompt_tokens=16) for r in reversed(reveals)]
    forwards = {"prefill": 1, "denoise": len(ids), "commit": 0}
    result = GenerationResult(
        id="x",
        token_ids=tuple(ids),
        text=text,
        finish_reason="stop",
        prompt_tokens=16,
        forwards=forwards,
        steps_per_block=[len(ids)],
    )
    return [*canvases, Delta("x", tuple(ids), text), Finished(result)]


@pytest.mark.parametrize("key", [None, "Escape"])
def test_stop_ends_both_answers_and_frees_their_rows(visit: Any, key: str | None) -> None:
    backend = ScriptedBackend([*spelling("half")[:2], "wait"])
    with listening(backend) as address:
        here = visit(address)
        here.ask("Hello")
        for pane in ("blocks", "ar"):
            here.pane(pane).locator(".cell:not(.masked)").nth(1).wait_for()
        here.page.keyboard.press(key) if key else here.page.get_by_role("button", name="Stop").click()
        here.until_status("Stopped.")
        while len(backend.aborted) < 2:
            here.page.wait_for_timeout(20)
        assert sorted(backend.aborted) == sorted(backend.running)
        assert here.pane("blocks").locator(".canvas").inner_text().strip() == "lf", "what was opened stays"
        backend.script = spelling("whole")
        here.ask("Hello")
        here.until_status("Done")
        assert here.pane("blocks").locator("pre").text_content() == "whole"


def test_what_a_model_writes_is_text_and_never_markup(visit: Any) -> None:
    hostile = """<img src=x onerror="window.hit=1"><script>window.hit=1</script>"""
    with listening(ScriptedBackend(spelling(hostile))) as address:
        here = visit(address)
        here.ask("Hello")
        here.until_status("Done")
        assert here.pane("blocks").locator("pre").text_content() == hostile
        assert here.pane("blocks").locator(".canvas").inner_text() == hostile
        assert here.page.locator("#panes img, #panes script").count() == 0
        blocked = """() => {
          try { document.body.append(Object.assign(document.createElement("script"), { text: "window.hit = 1" })); }
          catch { /* trusted types */ }
          return window.hit === undefined;
        }"""
        assert here.page.evaluate(blocked), "the policy lets a script of the markup run"
        here.complaints.clear()


def test_a_key_is_asked_for_where_the_server_has_keys_and_kept_in_memory_alone(visit: Any) -> None:
    keys = load_key_hashes(None, {"BLOCKCAST_API_KEYS": "right"})
    with listening(ScriptedBackend(spelling("fine")), keys=keys) as address:
        here = visit(address)
        here.until_problem("asks for an API key")
        field = here.page.get_by_label("API key")
        field.fill("wrong")
        field.press("Enter")
        here.until_problem("The API key is missing or wrong")
        here.complaints.clear()  # Chromium's console tells of each 401
        field.fill("right")
        here.page.get_by_role("button", name="Use this key").click()
        here.page.locator("#served").get_by_text("tiny").wait_for()
        here.ask("Hello")
        here.until_status("Done")
        assert here.pane("blocks").locator("pre").text_content() == "fine"
        kept = "[localStorage.length, sessionStorage.length, document.cookie.length, location.search.length]"
        assert here.page.evaluate(kept) == [0, 0, 0, 0]


class NotAdapted(ScriptedBackend):
    async def served(self) -> Served:
        return Served(AR_CARD, DecodeConfig(mode="ar"), created=0)


def test_nothing_can_be_asked_before_the_models_are_known(visit: Any) -> None:
    from playwright.sync_api import expect

    with listening(ScriptedBackend(spelling("fine"))) as address:
        here, held = visit(address), []
        write = here.page.get_by_role("button", name="Write", exact=True)
        here.page.route("**/v1/models", lambda route: held.append(route))
        here.page.reload()
        here.until_status("Asking which models are served")
        expect(write).to_be_disabled()
        held[0].continue_()
        expect(write).to_be_enabled()
        expect(here.page.get_by_role("status")).to_be_empty()


def test_a_model_that_was_not_adapted_shows_one_way_and_says_why(visit: Any) -> None:
    with listening(NotAdapted(spelling("fine"))) as address:
        here = visit(address)
        here.until_status("not adapted to write blocks")
        assert not here.pane("blocks").is_visible() and here.pane("ar").is_visible()
        here.ask("Hello")
        here.until_status("Done")
        assert here.pane("ar").locator("pre").text_content() == "fine"


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (JobError("It broke."), "It broke."),
        (Exception("secret"), "The connection broke before the answer was complete: send it again."),
    ],
)
def test_an_answer_that_breaks_off_is_told_in_a_sentence(visit: Any, failure: Exception, sentence: str) -> None:
    with listening(NotAdapted([*spelling("half of it")[:-1], failure])) as address:
        here = visit(address)
        here.ask("Hello")
        here.until_problem(sentence)
        if isinstance(failure, JobError):
            assert here.pane("ar").locator("pre").text_content() == "half of it"
        here.complaints.clear()  # Chromium's console tells of the broken connection
