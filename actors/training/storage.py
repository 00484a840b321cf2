"""Storage that fails: tried again with growing pauses, then told in one sentence.

A network filesystem answers "input/output error" for a second, an object store "slow down", a disk is full until
somebody frees some; none of them need end a run of days.
"""

from __future__ import annotations

import errno
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from model.errors import JobError

Result = TypeVar("Result")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HOPELESS = (PermissionError, IsADirectoryError, NotADirectoryError)  # waiting does not help these


def _print(message: str) -> None:
    print(f"adapt: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Patience:
    """How often storage is tried, and the first pause in seconds; each later pause is twice as long. say: told of each
    failure that is not the last."""

    tries: int = 5
    pause_s: float = 1.0
    say: Callable[[str], None] = _print

    def __call__(self, action: Callable[[], Result], what: str) -> Result:
        """The action's result. what: `writing X`, for the sentence of the JobError raised in the end."""
        attempt = 1
        while True:
            try:
                return action()
            except Exception as error:  # object stores raise classes of their own
                if not is_storage_error(error):
                    raise
                if isinstance(error, HOPELESS) or attempt >= self.tries:
                    raise _sentence(error, what, attempt) from error
                pause = self.pause_s * 2 ** (attempt - 1)
                self.say(f"{what} failed ({_first_line(error)}); again in {pause:g} s")
            time.sleep(pause)
            attempt += 1


PATIENT = Patience()


def is_storage_error(error: Exception) -> bool:
    """Whether storage, not the program, is at fault."""
    if isinstance(error, (OSError, EOFError)) or "PytorchStreamWriter" in str(error):
        return True
    return type(error).__module__.split(".")[0] in ("botocore", "aiohttp", "gcsfs", "google", "azure", "adlfs")


def _sentence(error: Exception, what: str, tries: int) -> JobError:
    tried = "" if tries == 1 else f" {tries} times"
    reason = "no space is left" if is_disk_full(error) else _first_line(error)
    remedy = "free some" if is_disk_full(error) else "see to the storage"
    return JobError(
        f"{what[0].upper()}{what[1:]} failed{tried} ({reason}): {remedy} and run the same command again to go on "
        "from the checkpoint before."
    )


def is_disk_full(error: Exception) -> bool:
    """Torch tells of a full disk in a RuntimeError of its own."""
    return (isinstance(error, OSError) and error.errno in DISK_FULL) or "PytorchStreamWriter" in str(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def check_space(folder: str, need: int) -> None:
    """Raises JobError where `need` bytes do not fit below a local folder."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise JobError(
            f"No space for a checkpoint in {folder}: it takes {_size(need)} and {_size(free)} are free; "
            "free some and run the same command again to go on."
        )


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
