"""Draw the masks from the predicates that the code runs on.

python -m model.mask_picture docs/masks.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from model.masks import CLEAN, NOISY_1, NOISY_2, Tokens, block_diffusion, dense, m_bc, m_bd, m_obc, stream_tokens

BLOCK, BLOCKS = 4, 4
DOCUMENTS = torch.tensor([0] * 12 + [1] * 4)
COLOURS = ("#f4f4f4", "#d1495b", "#2e86ab", "#7fb069")
NAMES = ("forbidden", "M_BD: own noisy block", "M_OBC: earlier clean blocks", "M_BC: clean, up to own block")


def colours(tokens: Tokens) -> torch.Tensor:
    """[T, T] index into COLOURS: which predicate allows a pair."""
    allowed = dense(block_diffusion, tokens)
    image = torch.zeros(allowed.shape, dtype=torch.long)
    for index, predicate in enumerate((m_bd, m_obc, m_bc), start=1):
        image[dense(predicate, tokens) & allowed] = index
    return image


def decoding_tokens() -> Tokens:
    """Three committed blocks and the working block, as rows of one document."""
    both = stream_tokens(torch.zeros(BLOCK * BLOCKS, dtype=torch.long), BLOCK, (CLEAN, NOISY_1))
    last = BLOCK * (BLOCKS - 1)
    return both.at(torch.cat((torch.arange(last), BLOCK * BLOCKS + torch.arange(last, BLOCK * BLOCKS))))


def panels() -> list[tuple[str, Tokens]]:
    return [
        ("published: two rows of 2L", stream_tokens(DOCUMENTS, BLOCK, (NOISY_1, CLEAN))),
        ("three streams, one row of 3L", stream_tokens(DOCUMENTS, BLOCK, (NOISY_1, NOISY_2, CLEAN))),
        ("decoding a block", decoding_tokens()),
    ]


def draw(path: Path) -> None:
    """Write the picture of all panels. Rows are queries, columns are keys; the second document is the last block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 5), gridspec_kw={"width_ratios": [2, 3, 1.4]})
    for axis, (title, tokens) in zip(axes, panels(), strict=True):
        axis.imshow(colours(tokens), cmap=ListedColormap(COLOURS), vmin=0, vmax=len(COLOURS) - 1)
        _label(axis, title, tokens)
    figure.legend(
        handles=[Patch(color=c, label=n) for c, n in zip(COLOURS, NAMES, strict=True)],
        loc="lower center",
        ncols=4,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(axis: Any, title: str, tokens: Tokens) -> None:
    names = {NOISY_1: "noisy 1", NOISY_2: "noisy 2", CLEAN: "clean"}
    count = len(tokens.stream)
    starts = [i for i in range(count) if i == 0 or tokens.stream[i] != tokens.stream[i - 1]]
    middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], count], strict=True)]
    labels = [names[int(tokens.stream[i])] for i in starts]
    axis.set_xticks(middles, labels)
    axis.set_yticks(middles, labels, rotation=90, va="center")
    axis.tick_params(length=0)
    axis.set_title(title, fontsize=10)
    for line in range(BLOCK, count, BLOCK):
        width = 1.6 if line in starts else 0.4
        axis.axhline(line - 0.5, color="#555555", linewidth=width)
        axis.axvline(line - 0.5, color="#555555", linewidth=width)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
