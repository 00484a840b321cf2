"""The configs of the published recipes' base models come with the project: a plan for them asks nobody."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "configs"
KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
}


def folder_of(source: str) -> Path | None:
    """The folder with the config.json of a known Hub id."""
    name = KNOWN.get(source)
    return None if name is None or Path(source).is_dir() else FOLDER / name
