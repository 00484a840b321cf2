"""One request at a time: AR, lossless and every block decoder of ours, transformers `generate`, the control; tokens/s
and exact match on held-out tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from model.backbone import DTYPES, Backbone, load_backbone
from model.config import DecodeConfig
from pipelines.assessment.contenders import AR, plain_name
from pipelines.assessment.questions import Question
from pipelines.benches.engine.contestants import (
    AR_NAME,
    Contestant,
    EngineContestant,
    compete,
    exact_match,
    line,
    over,
    share_equal,
)
from pipelines.benches.engine.setting import PartResult, Setting, parse_decoder
from pipelines.benches.engine.transformers_rival import TransformersContestant, load_rival
from pipelines.benches.result import device_name
from pipelines.benches.timing import Times

GENERATE, GENERATE_PACKED = "transformers generate", "transformers generate, packed products"
LOSSLESS_NAME = "lossless"  # its column "equal to AR" must say 1
FUSED = ("off", "masked_head", "speculative")
REFRESHES = ("always", "sub_block")


def block_decoders(setting: Setting) -> dict[str, DecodeConfig]:
    """Every policy in every fused form and refresh, and those of --also."""
    decoders = {
        _name(name, fused, refresh): replace(decode, fused=fused, refresh=refresh)
        for name, decode in setting.policies().items()
        for fused in FUSED
        for refresh in REFRESHES
    }
    return decoders | {f"blocks, {text}": parse_decoder(text) for text in setting.config.also}


def _name(policy: str, fused: str, refresh: str) -> str:
    """What differs from a plain decoder: a commit of its own, whole blocks in every step."""
    parts = [f"blocks, {policy}"]
    parts += [] if fused == "off" else [fused]
    parts += [] if refresh == "always" else [refresh]
    return ", ".join(parts)


def measure_single(setting: Setting) -> PartResult:
    """All contestants on the same questions; `points`: of exact match, 100 being all, above AR's."""
    decoders = {AR_NAME: AR, LOSSLESS_NAME: DecodeConfig(mode="lossless"), **block_decoders(setting)}
    engine = setting.engine(setting.requests(AR), 1)
    contestants: dict[str, Contestant] = {}
    for name, decode in decoders.items():
        requests = setting.requests(decode)
        for request in requests:
            engine.decoder.check(request)
        contestants[name] = EngineContestant(engine, requests)
    asked = setting.requests(AR)
    contestants[GENERATE] = TransformersContestant(load_rival(setting, packed=False), asked)
    contestants[GENERATE_PACKED] = TransformersContestant(load_rival(setting, packed=True), asked)
    backbones = _add_control(setting, contestants)
    times = compete("single", contestants, setting)
    lines = _lines(setting, contestants, backbones, times)
    return PartResult(lines, _ratios(list(decoders)[1:], contestants, times))


def _add_control(setting: Setting, contestants: dict[str, Contestant]) -> dict[str, Backbone]:
    """The control among the contestants; whose tokenizer reads which answers, where it is not the setting's."""
    source = setting.config.control
    if source is None:
        return {}
    control = load_backbone(source, dtype=DTYPES[setting.config.dtype], device=device_name())
    requests = setting.requests(AR, backbone=control)
    name = f"control {plain_name(source)}, AR"
    contestants[name] = EngineContestant(setting.engine(requests, 1, backbone=control), requests)
    return {name: control}


def _lines(
    setting: Setting, contestants: Mapping[str, Contestant], backbones: Mapping[str, Backbone], times: Times
) -> list[dict[str, Any]]:
    questions = setting.questions()
    reference = contestants[AR_NAME].answers
    baseline = _judged(setting, reference, questions, setting.backbone)
    lines = []
    for name, contestant in contestants.items():
        right = _judged(setting, contestant.answers, questions, backbones.get(name, setting.backbone))
        common = line("single", 1, name, contestants, times)
        lines.append(
            {
                **{key: value for key, value in common.items() if key != "batch"},
                "over generate": over(name, GENERATE, contestants, times),
                "exact match": right,
                "points": None if right is None or baseline is None else 100 * (right - baseline),
                "equal to AR": share_equal(contestant.answers, reference),
            }
        )
    return lines


def _judged(
    setting: Setting, answers: Sequence[tuple[int, ...]], questions: Sequence[Question], backbone: Backbone
) -> float | None:
    return exact_match(answers, questions, backbone) if setting.adapted else None


def _ratios(blocks: Sequence[str], contestants: Mapping[str, Contestant], times: Times) -> dict[str, float]:
    """Blocks over AR and over transformers, and the two AR decoders against each other."""
    ratios = {}
    for name in blocks:
        ratios[f"{name} over AR, same engine"] = over(name, AR_NAME, contestants, times)
        ratios[f"{name} over {GENERATE}"] = over(name, GENERATE, contestants, times)
    for rival in (GENERATE, GENERATE_PACKED):
        ratios[f"AR over {rival}"] = over(AR_NAME, rival, contestants, times)
    return ratios
