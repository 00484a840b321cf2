"""Compile the C++ sources of this folder once a machine, and load them.

The library is plain C++17 behind a C interface, without PyTorch's headers: it compiles in 15 to 45 seconds (of one
core), needs no ninja, and survives an update of torch. It lies in the user's cache under a hash of the sources, the
flags and this machine's processor; it appears there by rename, so processes that compile at the same time do no harm.
Without a compiler `load_kernels` warns once and gives None: the caller stays on PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from model.sources import cache_folder

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
NATIVE = "-march=native"
COMPILERS = ("g++", "c++", "clang++")
FALLBACK = "decoding stays on PyTorch, which is several times slower"

log = logging.getLogger(__name__)


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled library for this machine, or None (with one warning) where it cannot be had."""
    try:
        return load_library(NATIVE)
    except BuildError as error:
        log.warning("%s: %s.", error, FALLBACK)
        return None


class BuildError(Exception):
    """Why there is no library: half a sentence."""


def load_library(architecture: str) -> ctypes.CDLL:
    """The library compiled with `architecture` (-march=...), from the cache or made now. Raises BuildError."""
    path = cache_folder() / "kernels" / f"{fingerprint(architecture)}.so"
    try:
        if not _is_whole(path):
            _compile(architecture, path)
    except OSError as error:
        raise BuildError(f"The decoding kernels cannot be compiled into {path.parent} ({error.strerror})") from error
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"The compiled kernels {path} do not load ({error})") from error
    library.blockcast_model_new.restype = ctypes.c_void_p
    return library


def fingerprint(architecture: str) -> str:
    """Hash of all that decides what the compiler writes: sources, flags, processor, C library."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((FLAGS, architecture, platform.machine(), platform.libc_ver(), _processor())).encode())
    return digest.hexdigest()


def _processor() -> str:
    """The processor's feature flags, where the system lists them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return flags[0] if flags else platform.processor()


def _is_whole(path: Path) -> bool:
    """Whether the library is there to its last byte: loading one that a crash cut short would end the process."""
    return path.is_file() and path.read_bytes().endswith(path.stem.encode())


def _compile(architecture: str, target: Path) -> None:
    compiler = _compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
        part = Path(folder) / target.name
        command = [*compiler, *FLAGS, architecture, str(SOURCES / "kernels.cpp"), "-o", str(part)]
        log.info("Compiling the decoding kernels, once for this machine (some 15 to 45 seconds).")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not part.is_file():
            raise BuildError(
                f"The decoding kernels do not compile with {shlex.join(compiler)} ({_first_error(done.stderr)})"
            )
        with part.open("ab") as file:
            file.write(target.stem.encode())  # behind the library's last section, for `_is_whole`
        os.replace(part, target)


def _compiler() -> list[str]:
    """The words that begin a call of the compiler; CXX may hold several ("ccache g++")."""
    wanted = os.environ.get("CXX")
    choices = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    found = next((words for words in choices if words and shutil.which(words[0])), None)
    if found is None:
        looked = f"the compiler that CXX names, {wanted}," if wanted else "a C++ compiler (g++, c++ or clang++)"
        raise BuildError(f"The decoding kernels need {looked} and none was found")
    return found


def _first_error(output: str) -> str:
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
