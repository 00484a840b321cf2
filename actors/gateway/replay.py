"""An answer that is run a second time, because its first engine went away, goes on exactly where the client is.

The same request gives the same tokens on any engine in float32, alone or in a batch; so what the second run repeats is
compared and left out. Where it differs (bfloat16 on another kind of machine, mode "auto" at another load), the client
gets an error, never a wrong word.
"""

from __future__ import annotations

from dataclasses import replace

from actors.engine.events import Canvas, Delta, Event, Finished
from model.errors import JobError

DIVERGED = "The engine that began this answer went away, and another continued it differently: send the request again."


class Replay:
    """What a client has got of one answer, over all of its runs."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._tokens: list[int] = []
        self._text = ""
        self._run_tokens = 0
        self._run_text = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer's tokens so far."""
        return tuple(self._tokens)

    def begin(self) -> None:
        """A run starts from the first token."""
        self._run_tokens = 0
        self._run_text = ""

    def pass_on(self, event: Event) -> Event | None:
        """The part of the event that the client has not got; None: nothing. Raises JobError where the runs differ."""
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Canvas):
            return replace(event, id=self._id) if self._run_tokens >= len(self._tokens) else None
        if isinstance(event, Finished):
            result = event.result
            _same(list(result.token_ids[: len(self._tokens)]), self._tokens)
            _same(result.text[: len(self._text)], self._text)
            return replace(event, result=replace(result, id=self._id))
        return replace(event, id=self._id)

    def _delta(self, event: Delta) -> Delta | None:
        start = self._run_tokens
        self._run_tokens += len(event.token_ids)
        self._run_text += event.text
        repeated = max(0, min(self._run_tokens, len(self._tokens)) - start)
        _same(list(event.token_ids[:repeated]), self._tokens[start : start + repeated])
        both = min(len(self._run_text), len(self._text))
        _same(self._run_text[:both], self._text[:both])
        tokens, text = event.token_ids[repeated:], self._run_text[len(self._text) :]
        if not tokens and not text:
            return None
        self._tokens += tokens
        self._text += text
        logprobs = None if event.logprobs is None else event.logprobs[repeated:]
        return Delta(self._id, tokens, text, logprobs)


def _same(mine: object, sent: object) -> None:
    if mine != sent:
        raise JobError(DIVERGED)
