"""`bench.py methods`: who competes, and the table.

The contenders, every model in AR mode, writing blocks and in lossless mode, answer the same held-out tasks in turns, in
one process (`pipelines.assessment.measuring`). tokens/s are those of all of a contender's turns; a ratio is the median
over turns of the ratio within a turn. `equal to its AR`: answers that are, token for token, those of the same model in
AR mode, which in lossless mode must be all. `per forward` are tokens per denoising or commit forward; `forward ms` is
all of a contender's time over their number, prompts and choices included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from actors.protocol.calls import check_default
from model.config import DecodeConfig
from model.errors import UserError
from model.sources import fetch_model
from pipelines.assessment.contenders import AR, Contender, Subject, subject_of
from pipelines.assessment.figures import Figures, figures_of
from pipelines.assessment.journal import Journal
from pipelines.assessment.measuring import Settings, measure, split_rounds
from pipelines.assessment.questions import task_questions
from pipelines.benches.methods.config import MethodsBenchConfig
from pipelines.benches.methods.cost import training_cost
from pipelines.benches.methods.memory import Memory, memory_of
from pipelines.benches.result import Result, device_name, machine

MIB = 2**20
MINUTE = 60
CONTROL = "control"
CONTROL_AR = f"{CONTROL}, AR"
MEMORY_TASKS = 8
ROLES = {
    "base": "base",
    "fast_dllm_v2": "Fast-dLLM v2",
    "two_tower": "TwoTower",
    "two_tower_lora": "TwoTower, LoRA",
}

Turns = list[dict[str, Any]]


def run_methods(config: MethodsBenchConfig) -> Result:
    """Measure all contenders."""
    subjects = find_models(config)
    contenders = [one for subject in subjects for one in contenders_of(subject, config)]
    settings = Settings(config.dtype, device_name(), config.max_rows, config.seed, config.weights)
    questions = task_questions(config.tasks, config.seed, config.max_tokens, config.kinds) * config.rounds
    with tempfile.TemporaryDirectory(prefix="blockcast-bench-") as scratch:
        journal = Journal(Path(scratch) / "measured.jsonl")
        measure(contenders, questions, settings, journal)
        rounds = range(len(split_rounds(questions, settings)))
        turns = {c.label: [journal["round", c.label, number] for number in rounds] for c in contenders}
    memory = {c.label: _memory(c, settings, config) for c in contenders} if config.memory else {}
    figures = {c.label: _figures(c, turns[c.label]) for c in contenders}
    lines = [_line(c, figures, turns, memory.get(c.label)) for c in contenders]
    lines += [_cost_line(subject) for subject in subjects]
    return Result(
        "methods", machine(config.dtype), len(rounds), lines, _ratios(contenders, figures, turns), _note(config)
    )


# ------------------------------------------------------------------------------------------------- who competes
def find_models(config: MethodsBenchConfig) -> list[Subject]:
    """The control first, then the others that are given. Raises UserError where nothing is to be compared."""
    if config.model is not None or config.control is None:
        raise UserError("bench methods takes no --model but --control, and models to compare with it.")
    given = {name: getattr(config, name) for name in ROLES if getattr(config, name) is not None}
    if not given:
        raise UserError(f"Nothing to compare with --control: give one of {', '.join(f'--{name}' for name in ROLES)}.")
    subjects = [subject_of(CONTROL, config.control, "ar")]
    for name, source in given.items():
        subject = subject_of(ROLES[name], source, "ar" if name == "base" else None)
        if name != "base" and subject.block_diffusion is None:
            raise UserError(f"--{name} {source} was not adapted to write blocks: give it as --base.")
        subjects.append(subject)
    return subjects


def contenders_of(subject: Subject, config: MethodsBenchConfig) -> list[Contender]:
    """AR mode, and of a model that writes blocks: each of its policies, and lossless mode."""
    found = [Contender(f"{subject.role}, AR", subject, AR)]
    if subject.role == CONTROL or subject.block_diffusion is None:
        return found
    for text, decode in _policies(subject, config).items():
        found.append(Contender(f"{subject.role}, {text}", subject, check_default(decode, subject.block_diffusion)))
    if config.lossless:
        lossless = check_default(DecodeConfig(mode="lossless"), subject.block_diffusion)
        found.append(Contender(f"{subject.role}, lossless", subject, lossless))
    return found


def _policies(subject: Subject, config: MethodsBenchConfig) -> dict[str, DecodeConfig]:
    if subject.two_tower:
        return {f"blocks {g:g}": DecodeConfig(policy="budgeted", gamma=g, steps=config.steps) for g in config.gammas}
    return {f"blocks {t:g}": DecodeConfig(threshold=t) for t in config.thresholds}


# ------------------------------------------------------------------------------------------------- the table
def _figures(contender: Contender, turns: Turns) -> Figures:
    answers = [answer for turn in turns for answer in turn["answers"]]
    return figures_of(contender.label, contender.subject.role, answers, sum(turn["seconds"] for turn in turns), None)


def _memory(contender: Contender, settings: Settings, config: MethodsBenchConfig) -> Memory:
    tasks = min(MEMORY_TASKS, config.tasks)
    return memory_of(contender, settings, tasks=tasks, max_tokens=config.max_tokens, kinds=config.kinds)


def _line(
    contender: Contender, figures: Mapping[str, Figures], turns: Mapping[str, Turns], memory: Memory | None
) -> dict[str, Any]:
    mine, own = figures[contender.label], f"{contender.subject.role}, AR"
    return {
        "part": "decoding",
        "decoder": contender.label,
        "exact match": mine.accuracy.value,
        "of control's": _share(mine, figures[CONTROL_AR]),
        "tokens/s": mine.tokens_per_second,
        "over control": speed_ratio(turns[contender.label], turns[CONTROL_AR]),
        "over its AR": speed_ratio(turns[contender.label], turns[own]),
        "per forward": mine.tokens_per_forward,
        "forward ms": 1000 * mine.seconds / max(1, mine.forwards),
        "equal to its AR": share_equal(turns[contender.label], turns[own]),
        **({} if memory is None else {"loaded MiB": memory.loaded / MIB, "peak MiB": memory.peak / MIB}),
    }


def _share(mine: Figures, control: Figures) -> float | None:
    """Exact match over the control's; None where the control has nothing right."""
    if not control.accuracy.value or mine.accuracy.value is None:
        return None
    return mine.accuracy.value / control.accuracy.value


def speed_ratio(mine: Turns, others: Turns) -> float:
    """tokens/s over the other's: the median over turns, in each of which both answered the same questions."""
    return median(_speed(one) / _speed(other) for one, other in zip(mine, others, strict=True))


def _speed(turn: Mapping[str, Any]) -> float:
    tokens: int = sum(answer["usage"]["completion_tokens"] for answer in turn["answers"])
    return tokens / turn["seconds"]


def share_equal(mine: Turns, own: Turns) -> float:
    """Answers with the same token ids, 0 to 1."""
    pairs = [pair for one, other in zip(mine, own, strict=True) for pair in _pairs(one, other)]
    return sum(a["token_ids"] == b["token_ids"] for a, b in pairs) / len(pairs)


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(one["answers"], other["answers"], strict=True))


def _cost_line(subject: Subject) -> dict[str, Any]:
    cost = training_cost(fetch_model(subject.source))
    line: dict[str, Any] = {"part": "training", "decoder": subject.role, "model": subject.name}
    if cost is None:
        return line
    return line | {
        "objective": cost.objective,
        "steps": cost.steps,
        "tokens": cost.tokens,
        "answer tokens": cost.supervised,
        "minutes": cost.seconds / MINUTE,
        "trained parameters": cost.parameters,
    }


def _ratios(
    contenders: Sequence[Contender], figures: Mapping[str, Figures], turns: Mapping[str, Turns]
) -> dict[str, float]:
    ratios = {}
    for contender in contenders:
        if contender.decode.mode == "ar":
            continue
        mine, own = turns[contender.label], f"{contender.subject.role}, AR"
        share = _share(figures[contender.label], figures[CONTROL_AR])
        if share:
            ratios[f"{contender.label}: exact match over the control's"] = share
        ratios[f"{contender.label}: tokens/s over the control's"] = speed_ratio(mine, turns[CONTROL_AR])
        ratios[f"{contender.label}: tokens/s over its own AR mode's"] = speed_ratio(mine, turns[own])
    return ratios


def _note(config: MethodsBenchConfig) -> str:
    times = "" if config.rounds == 1 else f", {config.rounds} times"
    quantised = "" if config.weights == "model" else f", {config.weights} weights"
    kinds = f" ({', '.join(config.kinds)})" if config.kinds else ""
    return (
        f"{config.tasks} held-out tasks{kinds}{times}, answers of at most {config.max_tokens} tokens, greedy, "
        f"{config.max_rows} at a time{quantised}; a number behind blocks is Fast-dLLM v2's threshold, TwoTower's gamma."
    )
