"""What a GPU does not have to hold: optimizer state and parameters kept in the machine's memory or on its NVMe disks.

DeepSpeed's own offloading (ZeRO-Offload, ZeRO-Infinity): state that is offloaded is also updated there, by its AdamW
for CPUs. Where it cannot work it is refused before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.errors import UserError

PLACES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Offload:
    """Where a worker's share lies when it is not used; each one of PLACES. path: a folder on the node's NVMe disk."""

    optimizer: str = "none"
    parameters: str = "none"
    path: str | None = None

    @property
    def on(self) -> bool:
        return self.optimizer != "none" or self.parameters != "none"

    def check(self, *, device: str, zero_stage: int) -> None:
        """Raises UserError, naming the key, where DeepSpeed could not do it."""
        nvme = [key for key in ("optimizer", "parameters") if getattr(self, key) == "nvme"]
        if self.on and device == "cpu":
            key = "optimizer" if self.optimizer != "none" else "parameters"
            raise UserError(
                f"--train.offload.{key} {getattr(self, key)} makes room on a GPU and this run computes on the CPU, "
                "whose memory holds everything anyway: leave it out."
            )
        if self.parameters != "none" and zero_stage < 3:
            raise UserError(
                f"--train.offload.parameters {self.parameters} needs parameters that are shared out: "
                f"set --train.zero_stage 3, not {zero_stage}."
            )
        if self.optimizer != "none" and zero_stage < 1:
            raise UserError(
                f"--train.offload.optimizer {self.optimizer} needs an optimizer that is shared out: "
                "set --train.zero_stage to 1, 2 or 3."
            )
        if self.optimizer == "nvme" and zero_stage < 3:
            raise UserError(
                f"--train.offload.optimizer nvme needs --train.zero_stage 3, not {zero_stage}: or take cpu."
            )
        if nvme and not self.path:
            raise UserError(f"--train.offload.{nvme[0]} nvme needs --train.offload.path, a folder on the NVMe disk.")
        if self.path and not nvme:
            raise UserError("--train.offload.path is given and nothing is offloaded to nvme: leave it out.")

    def settings(self) -> dict[str, Any]:
        """The part of DeepSpeed's `zero_optimization`."""
        told: dict[str, Any] = {}
        for key, name in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
            place = getattr(self, key)
            if place != "none":
                told[name] = {"device": place, "pin_memory": True}
            if place == "nvme":
                told[name]["nvme_path"] = self.path
        return told


NOTHING = Offload()
