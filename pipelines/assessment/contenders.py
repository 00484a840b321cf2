"""Who is compared: a contender is a model folder, the role it plays, and a way to decode it.

The base and the control decode token by token. An adapted model competes with itself: in AR mode, and writing blocks
once for each threshold (or in lossless mode), so that the weights are the same and only the decoding differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.protocol.calls import check_default
from model.config import BlockDiffusionConfig, DecodeConfig
from model.decoding import POLICIES
from model.errors import UserError
from model.loading import describe_model
from model.sources import fetch_model
from pipelines.jobkit import DecodeSection

AR = DecodeConfig(mode="ar")


@dataclass(frozen=True)
class Subject:
    """A model that is assessed. role: "base", "control", "adapted", or "model" for one that was not adapted."""

    role: str
    source: str
    block_diffusion: BlockDiffusionConfig | None

    @property
    def name(self) -> str:
        """What a report calls it."""
        return plain_name(self.source)

    @property
    def two_tower(self) -> bool:
        """Whether a second network writes its blocks."""
        return self.block_diffusion is not None and self.block_diffusion.two_tower


@dataclass(frozen=True)
class Contender:
    """One line of the table, one point of the plot."""

    label: str
    subject: Subject
    decode: DecodeConfig


def plain_name(source: str) -> str:
    """The own name of a model or file, without the place where it lies; a folder `model` keeps its parent's name."""
    *parents, name = source.rstrip("/").split("/")
    return f"{parents[-1]}/{name}" if name == "model" and parents else name


def find_subjects(model: str | None, base: str | None, control: str | None, mode: str | None = None) -> list[Subject]:
    """The models to assess, the base first; reads their configurations, not their weights. Raises UserError.

    mode: what decode.mode asks of `model`; the other two decode token by token.
    """
    given = [("base", base), ("control", control), ("adapted", model)]
    found = [
        subject_of(role, source, mode if role == "adapted" else "ar") for role, source in given if source is not None
    ]
    if not found:
        raise UserError("--model is required (or --base alone): a model folder, a Hub id or an fsspec URI.")
    return found


def subject_of(role: str, source: str, mode: str | None) -> Subject:
    """A model in this role, which is to decode in this mode (None: its own). Raises UserError where it cannot."""
    model = describe_model(fetch_model(source))
    model.check_mode(mode)
    block_diffusion = model.block_diffusion
    if role == "adapted" and block_diffusion is None:
        role = "model"
    return Subject(role, source, block_diffusion)


def make_contenders(
    subjects: Sequence[Subject], decode: DecodeSection, thresholds: Sequence[float] | None
) -> list[Contender]:
    """Every subject in AR mode, the adapted one also writing blocks, as `decode` and `thresholds` say.

    thresholds None: once, as `decode` says; in lossless mode there are none. Raises UserError for blocks asked of a
    model that was not adapted.
    """
    contenders = []
    for subject in subjects:
        main = subject.role in ("adapted", "model")
        if not main or decode.mode != "diffusion":
            contenders.append(Contender(f"{subject.role}, AR", subject, AR))
        if main and decode.mode == "lossless":
            contenders.append(_lossless(subject, decode, thresholds))
        elif main and _writes_blocks(subject, decode, thresholds):
            contenders += [
                Contender(f"{subject.role}, blocks {_policy_text(one)}", subject, one)
                for one in _block_configs(subject, decode, thresholds)
            ]
    labels = [contender.label for contender in contenders]
    if len(set(labels)) < len(labels):
        raise UserError("--thresholds names a threshold twice: give each once.")
    return contenders


def _lossless(subject: Subject, decode: DecodeSection, thresholds: Sequence[float] | None) -> Contender:
    if thresholds is not None:
        raise UserError("--thresholds has no effect with --decode.mode lossless: leave one of them out.")
    asked = check_default(decode.decode_config(adapted=True, two_tower=subject.two_tower), subject.block_diffusion)
    return Contender(f"{subject.role}, lossless", subject, asked)


def _writes_blocks(subject: Subject, decode: DecodeSection, thresholds: Sequence[float] | None) -> bool:
    if decode.mode == "ar":
        if thresholds is not None:
            raise UserError("--thresholds has no effect with --decode.mode ar: leave one of them out.")
        return False
    return subject.role == "adapted" or decode.mode == "diffusion" or thresholds is not None


def _block_configs(subject: Subject, decode: DecodeSection, thresholds: Sequence[float] | None) -> list[DecodeConfig]:
    asked = replace(decode.decode_config(adapted=True, two_tower=subject.two_tower), mode="diffusion")
    checked = check_default(asked, subject.block_diffusion)
    if thresholds is None:
        return [checked]
    if checked.policy != "threshold":
        raise UserError(f"--thresholds needs --decode.policy threshold, not {checked.policy}: leave one of them out.")
    return [replace(checked, threshold=threshold) for threshold in thresholds]


def _policy_text(decode: DecodeConfig) -> str:
    if decode.policy == "threshold":
        text = f"{POLICIES['threshold'].value(decode, 'threshold'):g}"
    elif decode.policy == "static":
        text = f"static {decode.steps or 'all'} steps"
    else:
        given = {name: decode.parameter(name) for name in POLICIES[decode.policy].parameters}
        text = " ".join([decode.policy, *(f"{name} {value:g}" for name, value in given.items() if value is not None)])
    return text if decode.sub_block_size is None else f"{text}, sub-block {decode.sub_block_size}"
