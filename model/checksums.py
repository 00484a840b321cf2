"""Whether files are still what was written: a CRC-32 each, in a small file beside them.

    checksums.json    {"model.safetensors": "crc32:0a1b2c3d"}

Against disks and copies that change bytes, not against people: safetensors and torch's files have no check of their own
that is looked at, so one changed bit is a wrong weight that nobody sees. CRC-32 runs at some 4 GB/s a core, so a check
costs little beside reading the file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from model.errors import UserError

NOTE = "checksums.json"
CHUNK_BYTES = 1 << 22


def checksum(path: Path) -> str:
    """`crc32:<hex>` of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"crc32:{value:08x}"


def note_checksums(note: Path, root: Path, names: Iterable[str]) -> None:
    """Write into `note` the checksums of files below `root`, by their names there."""
    found = {name: checksum(root / name) for name in sorted(names)}
    note.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read_checksums(note: Path) -> dict[str, str]:
    """What was noted, by name. Raises ValueError where the file is no such note."""
    content = json.loads(note.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content


def differing(noted: dict[str, str], root: Path, names: Iterable[str]) -> list[str]:
    """Of `names` those whose file is absent or not what was noted; one that was not noted is trusted."""
    known = [name for name in names if name in noted]
    return [name for name in known if not (root / name).is_file() or checksum(root / name) != noted[name]]


def note_weights(folder: Path) -> None:
    """Write a model folder's note over its weights; config and tokenizer are for people to change."""
    note_checksums(folder / NOTE, folder, [path.name for path in folder.glob("*.safetensors")])


def check_weights(folder: Path) -> None:
    """Raises UserError, naming the file, where a model folder's weights are not those that its note was made for."""
    note = folder / NOTE
    if not note.is_file():
        return
    try:
        noted = read_checksums(note)
    except ValueError:
        raise UserError(f"{note} is damaged: restore it, or remove it to do without the check.") from None
    damaged = differing(noted, folder, noted)
    if damaged:
        raise UserError(
            f"{folder / damaged[0]} is not what was written (its checksum is another than in {NOTE}): copy the model "
            f"again, or remove {NOTE} if the weights were changed on purpose."
        )
