"""The machine as a report names it: what a speed depends on, and no path or host name."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe_machine(dtype: str, device: str) -> dict[str, Any]:
    """cpu (its model name), instructions (the widest vectors that torch finds: AVX2, AVX512), cores (usable by this
    process), threads (of torch), torch, dtype; gpu where one is used."""
    found = {
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": dtype,
    }
    return {**found, "gpu": torch.cuda.get_device_name()} if device == "cuda" else found


def cpu_name() -> str:
    """The processor's model name as Linux knows it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def machine_text(machine: dict[str, Any]) -> str:
    """One line: `AMD EPYC with AVX512, 2 cores, 1 thread, torch 2.13.0, bfloat16`."""
    cpu = machine["cpu"] + (f" with {machine['instructions']}" if "instructions" in machine else "")
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    parts = [machine.get("gpu"), cpu, f"{machine['cores']} cores", threads, f"torch {machine['torch']}"]
    return ", ".join([*(part for part in parts if part), machine["dtype"]])
