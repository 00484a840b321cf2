"""What people read: the table (terminal and Markdown), the plot, and in plain words what the numbers do not show."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipelines.assessment.figures import Figures, Share, told_apart
from pipelines.jobkit.machine import machine_text

PLOT = "accuracy_speed.png"
COLUMNS = (
    "contender",
    "exact match",
    "95% interval",
    "tokens/s",
    "over its AR",
    "tokens per forward",
    "ended by itself",
    "masked loss",
    "next-token loss",
)
SHORT = {
    "contender": "contender",
    "exact match": "exact match",
    "95% interval": "95% interval",
    "tokens/s": "tokens/s",
    "over its AR": "over AR",
    "tokens per forward": "per forward",
    "masked loss": "loss",
}
PLAIN_WIDTH = 110
NOTHING = "–"


@dataclass(frozen=True)
class Setting:
    """What stands beside the numbers. source: where the questions come from; rows: decoded together; sizes in tokens.

    held_out: what the losses were measured on, None where they were not. models: role to name and revision.
    """

    title: str
    models: Mapping[str, str]
    source: str
    questions: int
    max_tokens: int
    rows: int
    weights: str
    machine: Mapping[str, Any]
    parameters: int
    held_out: str | None
    generated: bool


# ------------------------------------------------------------------------------------------------- the table
def table_rows(figures: Sequence[Figures]) -> list[list[str]]:
    """The cells under COLUMNS, one line a contender."""
    return [
        [
            one.label,
            share_text(one.accuracy),
            interval_text(one.accuracy),
            f"{one.tokens_per_second:.1f}",
            _speed_up(one, figures),
            f"{one.tokens_per_forward:.2f}",
            f"{one.stopped / one.questions:.0%}",
            _loss_text(one.masked_loss),
            _loss_text(one.next_token_loss),
        ]
        for one in figures
    ]


def share_text(share: Share) -> str:
    """`41.9% (26/62)`."""
    return NOTHING if share.value is None else f"{share.value:.1%} ({share.correct}/{share.count})"


def interval_text(share: Share) -> str:
    if share.interval is None:
        return NOTHING
    low, high = share.interval
    return f"{low:.1%} to {high:.1%}"


def _loss_text(loss: float | None) -> str:
    return NOTHING if loss is None else f"{loss:.3f}"


def _speed_up(one: Figures, figures: Sequence[Figures]) -> str:
    """Tokens per second over those of the same weights in AR mode."""
    for other in figures:
        if other.model == one.model and other.label == f"{one.label.partition(',')[0]}, AR":
            return f"{one.tokens_per_second / other.tokens_per_second:.2f}x"
    return NOTHING


def print_table(figures: Sequence[Figures], console: Console | None = None) -> None:
    """The table on the terminal, without what only report.md has room for."""
    console = console or Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    table = Table(title="Assessment", title_justify="left", box=box.SIMPLE_HEAD)
    for name in SHORT.values():
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for cells in table_rows(figures):
        named = dict(zip(COLUMNS, cells, strict=True))
        table.add_row(*(named[column] for column in SHORT))
    console.print(table)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left, the others to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ------------------------------------------------------------------------------------------------- the words
def report_text(figures: Sequence[Figures], setting: Setting) -> str:
    """report.md."""
    parts = [
        f"# {setting.title}",
        _how(setting),
        markdown_table(COLUMNS, table_rows(figures)),
        _legend(setting),
        f"![exact match against tokens per second]({PLOT})" if _points(figures) else "No answer was judged: no plot.",
        "## What these numbers do not show",
        "\n".join(f"- {sentence}" for sentence in caveats(figures, setting)),
    ]
    if any(share.count for one in figures for share in one.by_kind.values()):
        parts += ["## Exact match by kind", _kinds_table(figures)]
    return "\n\n".join(parts) + "\n"


def _how(setting: Setting) -> str:
    models = "; ".join(f"{role}: {name}" for role, name in setting.models.items())
    quantised = "" if setting.weights == "model" else f", every model with {setting.weights} weights"
    return (
        f"{date.today().isoformat()}. {models}. {setting.questions} questions ({setting.source}), answers of at most "
        f"{setting.max_tokens} tokens, greedy unless a prompt says otherwise, {setting.rows} decoded "
        f"together{quantised}. Machine: {machine_text(dict(setting.machine))}."
    )


def _legend(setting: Setting) -> str:
    text = (
        "Exact match: answers whose value is right, of those judged, with Wilson's 95% interval. tokens/s: answer "
        "tokens up to the stop token over the seconds of the contender's own turns, prefill included, after a warm-up; "
        "contenders took turns on the same questions. over its AR: that speed over the same weights decoded token by "
        "token. tokens per forward: answer tokens over denoising and commit forwards (AR shows a little more than 1, "
        "because the first token comes with the prompt). ended by itself: answers that stopped before the token limit."
    )
    if setting.held_out is None:
        return text
    return (
        f"{text} Losses: mean nats per supervised token on {setting.held_out}; masked: both complementary views under "
        "fixed seeded masks, a model that was not adapted with the mask token that adaptation would choose, a TwoTower "
        "model's denoiser at masked positions over all times; "
        "next-token: the same tokens read causally, as in AR mode."
    )


def caveats(figures: Sequence[Figures], setting: Setting) -> list[str]:
    """Plain sentences, from the numbers themselves where they depend on them."""
    judged = max((one.accuracy.count for one in figures), default=0)
    sentences = []
    if judged:
        sentences.append(
            f"The sample is small: {judged} judged questions, intervals as wide as the table says. {_apart(figures)}"
        )
    if setting.parameters < 1_000_000_000:
        sentences.append(
            f"The model is small ({_millions(setting.parameters)}): neither its accuracy nor its "
            "tokens per forward say what a model of billions reaches after the same treatment."
        )
    if setting.generated:
        sentences.append(
            "The questions come from the generator that also makes the default training data (no problem is in both): "
            "they measure whether what was taught was learnt, not general ability, and nothing here shows what "
            "adaptation cost elsewhere."
        )
    sentences.append(
        f"Speeds hold for this machine, this engine and {setting.rows} requests at a time; the more at a time, the "
        "less blocks gain, because a block's tokens then cost nearly as much as the same number of single tokens."
    )
    sentences.append(
        "A faster contender is better only where its exact match is not worse: read the two columns together. "
        "Contenders write answers of different lengths, which moves tokens/s by the share of prefill."
    )
    return sentences


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.0f} million parameters" if parameters >= 1e6 else f"{parameters:,} parameters"


def _apart(figures: Sequence[Figures]) -> str:
    pairs = told_apart(figures)
    if not pairs:
        return "No two contenders' intervals are apart: this sample does not rank them by exact match."
    listed = "; ".join(f"{better} above {worse}" for better, worse in pairs)
    return f"Intervals that are apart: {listed}. Every other order in the table may be chance."


def _kinds_table(figures: Sequence[Figures]) -> str:
    kinds = list(dict.fromkeys(kind for one in figures for kind in one.by_kind))
    rows = [
        [kind, *(f"{share.correct}/{share.count}" for share in (one.by_kind[kind] for one in figures))]
        for kind in kinds
    ]
    return markdown_table(["kind", *(one.label for one in figures)], rows)


# ------------------------------------------------------------------------------------------------- the plot
def _points(figures: Sequence[Figures]) -> list[Figures]:
    return [one for one in figures if one.accuracy.value is not None]


def draw_plot(figures: Sequence[Figures], setting: Setting, path: Path) -> None:
    """Exact match against tokens/s, one point with its interval per contender, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for one in _points(figures):
        low, high = one.accuracy.interval or (0.0, 0.0)
        value = one.accuracy.value or 0.0
        axes.errorbar(
            one.tokens_per_second,
            100 * value,
            yerr=[[100 * (value - low)], [100 * (high - value)]],
            fmt="o" if one.label.endswith("AR") else "s",
            capsize=3,
            label=one.label,
        )
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.set_ylim(-3, 103)
    axes.set_xlabel(f"tokens/s, {setting.rows} at a time")
    axes.set_ylabel("exact match, % (bars: 95% interval)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(setting.title, fontsize="medium")
    figure.savefig(path, dpi=150, format="png")
