"""What the OpenAPI document cannot say, told to schemathesis: which model there is, and which fields go together.

Only cases that must be accepted are touched: a case that breaks a rule stays as it was drawn. But none may ask Serve's
proxy for an answer in no time: that would be its own, in plain text.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import GenerationMode

from actors.gateway.serve_headers import TIMEOUT_HEADER
from model.decoding.policies import POLICIES
from tests.api.conftest import MODEL

FEW_TOKENS, FEW_CHOICES = 3, 2


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if case.headers and is_short(case.headers.get(TIMEOUT_HEADER)):
        case.headers[TIMEOUT_HEADER] = "60"
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    if case.path_parameters and "model" in case.path_parameters:
        case.path_parameters["model"] = MODEL
    if case.headers and "X-Deadline-S" in case.headers:
        case.headers["X-Deadline-S"] = "60"
    if isinstance(case.body, dict):
        case.body = fitting(case.body)


def is_short(seconds: Any) -> bool:
    """Whether Serve's proxy would take it for a time that may be over before there is an answer."""
    try:
        return 0 < float(seconds) < 60
    except (TypeError, ValueError):
        return False


def fitting(body: dict[str, Any]) -> dict[str, Any]:
    """The body, with what depends on other fields or on the served model made to fit it."""
    body = {**body, "model": MODEL}
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            body[name] = FEW_TOKENS
    if "messages" in body and "max_completion_tokens" not in body:
        body["max_completion_tokens"] = FEW_TOKENS
    if body.get("stream_options") is not None or (body.get("diffusion") or {}).get("trace"):
        body["stream"] = True
    if body.get("n") is not None:
        body["n"] = min(body["n"], FEW_CHOICES)
        body.pop("best_of", None)
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if isinstance(body.get("prompt"), list):
        body["prompt"] = known_ids(body["prompt"])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(token[:9]) % 300): bias for token, bias in body["logit_bias"].items()}
    if body.get("diffusion"):
        body["diffusion"] = consistent(body["diffusion"])
    if "messages" not in body or "prompt" not in body:
        return body
    return {name: value for name, value in body.items() if name != "prompt"}  # /tokenize reads one of them


def known_ids(prompt: list[Any]) -> list[Any]:
    return [
        known_ids(one) if isinstance(one, list) else int(one) % 300 if isinstance(one, int | float) else one
        for one in prompt
    ]


def consistent(diffusion: dict[str, Any]) -> dict[str, Any]:
    """The keys that have an effect together."""
    given = {name: value for name, value in diffusion.items() if value is not None}
    if given.get("mode") == "ar":
        return {name: value for name, value in given.items() if name in ("mode", "trace")}
    parameters = POLICIES[given.get("policy", "threshold")].parameters
    kept = {"mode", "policy", "refresh", "fused", "trace", *parameters}
    bounded = {"sub_block_size": 4, "gamma": 0.5, "steps": 2}
    return {name: bounded.get(name, value) for name, value in given.items() if name in kept}
