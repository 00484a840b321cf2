"""Every request field of OpenAI's two endpoints, in one table: honoured, or refused with a 400 that names it.

A refused field may still carry a value that asks for nothing (`n: 1`, `tools: []`): such a value changes no answer
and is accepted. `null` is always the same as leaving the field out. `python -m actors.protocol.fields` prints the
tables of docs/http.md; a test holds page, tables and the `openai` client's own field lists together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config import nearest_key
from model.errors import UserError

LONGEST_MESSAGE = 400  # characters


class RequestError(UserError):
    """A request that is refused. param: the field's path (`messages[0].content`), status: the HTTP status.

    retry_after_s: whole seconds after which the same request may be taken. What the message quotes stays short, and
    half of a surrogate pair is written as `\\ud800`: the answer must be text.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(_quoted(message))
        self.param = None if param is None else _quoted(param)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def _quoted(text: str) -> str:
    """The text without the middle of what a client made too long."""
    short = (
        text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 4 :]}"
    )
    return short.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class FieldRule:
    """What the server does with one field. neutral: values of a refused field that ask for nothing."""

    honoured: bool
    note: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        same_kind = (n for n in self.neutral if isinstance(n, bool) == isinstance(value, bool))
        return value is None or any(value == n for n in same_kind)


def honoured(note: str) -> FieldRule:
    return FieldRule(True, note)


def refused(note: str, *neutral: Any) -> FieldRule:
    return FieldRule(False, note, neutral)


_SHARED: dict[str, FieldRule] = {
    "model": honoured("required; the id that `GET /v1/models` lists, any other is a 404"),
    "max_tokens": honoured("at least 1; exact; prompt and answer must fit the context; absent: the rest of it"),
    "temperature": honoured("0 to 2; 0 is greedy; absent: the model's generation_config, greedy unless it samples"),
    "top_p": honoured("0 to 1"),
    "top_k": honoured("0 (off) or more; not OpenAI's"),
    "min_p": honoured("0 (off) to 1: draws only tokens at least so likely beside the likeliest; not OpenAI's"),
    "repetition_penalty": honoured(
        "above 0; 1 is off; over prompt and answer; absent: the model's generation_config; not OpenAI's"
    ),
    "presence_penalty": honoured("-2 to 2; over the answer's tokens"),
    "frequency_penalty": honoured("-2 to 2; over the answer's tokens"),
    "logit_bias": honoured("token ids with biases from -100 to 100"),
    "seed": honoured("a 64-bit whole number; the same request and seed give the same answer; absent: drawn at random"),
    "stop": honoured("one string or up to four; the text ends before the first that appears"),
    "stream": honoured("server-sent events, ended by `[DONE]`"),
    "stream_options": honoured("only when streaming; `include_usage` honoured, `include_obfuscation` only false"),
    "user": honoured("written to the request log"),
    "diffusion": honoured("how blocks are opened, see below; not OpenAI's"),
    "n": honoured("1 to 16 answers to one prompt, each with an `index` and a seed of its own, see below"),
}

CHAT_FIELDS: dict[str, FieldRule] = {
    "messages": honoured(
        "text only; system, developer (read as system), user, assistant; a last assistant message is continued"
    ),
    **_SHARED,
    "max_completion_tokens": honoured("the newer name of `max_tokens`; both with different values is a 400"),
    "safety_identifier": honoured("written to the request log"),
    "logprobs": honoured("true: the log-probability of every token of the answer, see below"),
    "top_logprobs": honoured("0 to 20, only with `logprobs`: also of so many most likely tokens"),
    "response_format": refused("no grammar is enforced", {"type": "text"}),
    "tools": refused("no tool calls", []),
    "tool_choice": refused("no tool calls", "none"),
    "parallel_tool_calls": refused("no tool calls", False),
    "functions": refused("no tool calls", []),
    "function_call": refused("no tool calls", "none"),
    "modalities": refused("text only", ["text"]),
    "audio": refused("text only"),
    "web_search_options": refused("no web search"),
    "prediction": refused("no predicted outputs"),
    "moderation": refused("no moderation"),
    "reasoning_effort": refused("no reasoning control", "none"),
    "verbosity": refused("no verbosity control", "medium"),
    "metadata": refused("nothing is stored", {}),
    "store": refused("nothing is stored", False),
    "service_tier": refused("one tier", "auto", "default"),
    "prompt_cache_key": refused("no cache control"),
    "prompt_cache_options": refused("no cache control"),
    "prompt_cache_retention": refused("no cache control"),
}

COMPLETION_FIELDS: dict[str, FieldRule] = {
    "prompt": honoured("one string, or one list of token ids; a list of several prompts is a 400"),
    **_SHARED,
    "max_tokens": honoured("at least 1; exact; prompt and answer must fit the context; absent: 16"),
    "best_of": refused("every answer is returned", 1),
    "echo": refused("the prompt is not repeated", False),
    "logprobs": honoured("0 to 20: the log-probability of every token and of so many most likely ones, see below"),
    "suffix": refused("no text after the answer", ""),
}


def check_fields(fields: Mapping[str, Any], rules: Mapping[str, FieldRule]) -> dict[str, Any]:
    """The honoured fields of a request. Raises RequestError for an unknown field, or a refused one."""
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is None:
            raise RequestError(
                f"{name!r} is not a field of this request: {nearest_key(str(name), rules)}", param=str(name)
            )
        if not rule.honoured and not rule.accepts(value):
            accepted = " or ".join(["null", *(json.dumps(n) for n in rule.neutral)])
            raise RequestError(f"{name} is not supported ({rule.note}): leave it out, or send {accepted}.", param=name)
    return {name: value for name, value in fields.items() if rules[name].honoured}


def markdown(rules: Mapping[str, FieldRule]) -> str:
    """The table of one endpoint, as docs/http.md shows it."""
    lines = ["| field | | how |", "|---|---|---|"]
    for name, rule in rules.items():
        word = "honoured" if rule.honoured else "refused"
        accepted = "; accepted: " + ", ".join(f"`{json.dumps(n)}`" for n in rule.neutral) if rule.neutral else ""
        lines.append(f"| `{name}` | {word} | {rule.note}{accepted} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"### POST /v1/chat/completions\n\n{markdown(CHAT_FIELDS)}\n")
    print(f"### POST /v1/completions\n\n{markdown(COMPLETION_FIELDS)}")
