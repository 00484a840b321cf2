"""report.html and lengths.png: the figures of every file, and what the model learns, coloured and harmless."""

from __future__ import annotations

import re
from html import unescape

import numpy as np
import pytest

from pipelines.chats.page import Example, choose_examples, page
from tests.pipelines.prepared import chat, write_lines

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_page_shows_what_is_learnt_and_runs_nothing_of_the_data(prepare, tmp_path):
    script = "<script>alert('x')</script>"
    lines = [chat(f"{script} question", f"answer é {script}"), {"messages": []}, *(chat("q", "a" * n) for n in (2, 50))]
    data = write_lines(tmp_path / "<b>.jsonl", lines)
    result = prepare("--data", str(data))
    html = (result.output / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|b)\b", html)
    learnt = [unescape(text) for text in re.findall(r"<mark>(.*?)</mark>", html, re.DOTALL)]
    assert learnt[1:] == [f"answer é {script}<|im_end|>", "a" * 50 + "<|im_end|>"]
    assert "1" in re.search(r"<td>empty chat</td><td>(\d+)</td>", html).group(1)  # type: ignore[union-attr]
    picture = (result.output / "lengths.png").read_bytes()
    assert picture.startswith(PNG) and len(picture) > 5000


@pytest.mark.parametrize(("lengths", "chosen"), [([], []), ([5], [0]), ([5, 9, 7, 8], [0, 1, 3])])
def test_the_first_a_middling_and_the_longest_document_are_examples(lengths, chosen):
    assert choose_examples(np.array(lengths)) == chosen


def test_a_long_example_is_cut_and_says_so():
    shown = page(STATS, [Example("f", (("text", False), ("more", True)), length=2000, shown=1500)], PNG)
    assert "<pre>text<mark>more</mark> … 500 more tokens</pre>" in shown


STATS = {
    "documents": 1, "turns": 2, "tokens": 3, "rows": 1, "context_length": 128, "block_size": 8, "fill": 0.99,
    "token_fill": 0.9, "supervised_share": 0.5, "held_out": {"documents": 0}, "files": {}, "rejected_by_reason": {},
}  # fmt: skip
