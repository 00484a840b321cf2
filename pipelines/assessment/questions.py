"""What the contenders are asked: generated tasks that training never saw, or the prompts of a file.

A prompt is a line as generate reads it, plus `answer` (the exact text expected; without it the answer is not judged)
and `kind` (the group it is counted in). Sampling fields mean what they mean elsewhere, except that an absent
temperature is 0, for contenders are compared greedily. `diffusion` is the contender's own and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.answers import Prompt
from actors.protocol.calls import derived_seed, generation_request
from actors.protocol.card import ModelCard
from model.config import DecodeConfig
from model.decoding import GenerationRequest
from model.errors import UserError
from pipelines.prompt_files import prompt_ids, read_prompts
from pipelines.tasks import Task, generate, kinds_named

OWN_KIND = "prompts"


@dataclass(frozen=True)
class Question:
    """A prompt and how its answer is judged. check None: it is not judged."""

    id: str
    kind: str
    fields: Mapping[str, Any]
    check: Callable[[str], bool] | None

    def judge(self, text: str) -> bool | None:
        return None if self.check is None else self.check(text)


def task_questions(count: int, seed: int, max_tokens: int, kinds: Sequence[str] = ()) -> list[Question]:
    """`count` held-out tasks, the kinds (all, or those named) taking turns."""
    tasks = generate("held_out", count, seed, kinds=kinds_named(kinds))
    return [_task_question(task, max_tokens) for task in tasks]


def _task_question(task: Task, max_tokens: int) -> Question:
    fields = {"messages": task.messages, "max_tokens": max_tokens, "temperature": 0.0}
    return Question(task.id, task.kind, fields, task.check)


def own_questions(source: str, max_tokens: int) -> list[Question]:
    """The prompts of a JSONL file. Raises UserError naming the line for one that cannot be used."""
    prompt_ids(source)  # refuses duplicates and an empty file
    return [_own_question(prompt, max_tokens) for prompt in read_prompts(source)]


def _own_question(prompt: Prompt, max_tokens: int) -> Question:
    if prompt.error is not None:
        raise UserError(f"--prompts: {prompt.error}.")
    fields = {name: value for name, value in prompt.fields.items() if value is not None}
    answer, kind = (_text(prompt, fields, name) for name in ("answer", "kind"))
    if "diffusion" in fields:
        raise _refused(prompt, "diffusion is chosen by the contenders (--decode.*, --thresholds): leave it out")
    if "max_completion_tokens" not in fields:
        fields.setdefault("max_tokens", max_tokens)
    fields.setdefault("temperature", 0.0)
    check = None if answer is None else ExactText(answer)
    return Question(prompt.id, kind or OWN_KIND, fields, check)


def _text(prompt: Prompt, fields: dict[str, Any], name: str) -> str | None:
    """Take a text field of ours out of the fields of the request."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise _refused(prompt, f"{name} must be a string, not {type(value).__name__}")
    return value


def _refused(prompt: Prompt, message: str) -> UserError:
    return UserError(f"--prompts: line {prompt.index} (id {prompt.id!r}): {message}.")


@dataclass(frozen=True)
class ExactText:
    """The answer is `expected`, blanks around it aside."""

    expected: str

    def __call__(self, text: str) -> bool:
        return text.strip() == self.expected.strip()


def make_requests(
    questions: Iterable[Question], card: ModelCard, decode: DecodeConfig, seed: int
) -> list[GenerationRequest]:
    """The questions as requests to one contender. Raises UserError naming the question that it cannot run."""
    requests = []
    for question in questions:
        try:
            requests.append(
                generation_request(
                    question.fields,
                    card=card,
                    default_decode=decode,
                    request_id=question.id,
                    default_seed=derived_seed(seed, question.id),
                )
            )
        except UserError as error:
            raise UserError(f"Question {question.id!r} cannot be asked of {card.name}: {error}") from error
    return requests
