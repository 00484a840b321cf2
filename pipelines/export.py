"""A checkpoint in, an ordinary model folder out: `python pipelines/export.py --model CHECKPOINT --output FOLDER`.

    python pipelines/export.py --model out/mine/checkpoints/step_4000 --output out/step_4000
    python pipelines/export.py --model out/mine/model --format fast_dllm_v2 --output out/published
    python pipelines/export.py --model BASE --adapter out/lora/adapter --output out/merged
    python pipelines/export.py --model out/towers/model --dtype bfloat16 --output out/towers16

Reads a checkpoint of an adapt run (DeepSpeed's shards; no training is started), or any model that the other jobs read:
a folder, a URI, a Hub id, in our layout or the published one. Writes safetensors, config and tokenizer: as the base
class that transformers knows, with "block_diffusion" in config.json, or in the layout of the published Fast-dLLM v2
checkpoints, without their code. Before it takes its name the folder is loaded by a fresh process that imports
transformers alone, and its logits are compared with those of the weights in memory. A folder of two towers becomes one
that needs no other (`pipelines.exporting.towers`), each network in it proven like a model of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from actors.training.checkpoints import COMMIT, FOLDER
from actors.training.consolidate import OpenCheckpoint, is_checkpoint, open_checkpoint
from model.adapters import adapter_revision
from model.backbone import DTYPES, Backbone, load_backbone, read_architecture, revision_of
from model.errors import UserError
from model.loading import model_revision
from model.sources import fetch_model
from model.two_tower.folder import is_two_tower
from pipelines.exporting.layouts import check_layout, loader_of, write_layout
from pipelines.exporting.proof import Proof, probe_of, prove
from pipelines.exporting.towers import HINT, Towers, open_towers
from pipelines.jobkit import NOT_IDENTITY, JobConfig, OutputFolder, main
from pipelines.jobkit.identity import hash_file


class ExportConfig(JobConfig):
    """Write a checkpoint of an adapt run, or any model, as one consolidated folder that transformers loads; prove that
    it does by loading it in a fresh process and comparing logits."""

    model: str | None = Field(
        None,
        description="<output of adapt>/checkpoints/step_N, or a model: a folder, an fsspec URI or a Hub id",
    )
    adapter: str | None = Field(
        None, description="LoRA adapter (peft) to merge into the weights: a folder, an fsspec URI or a Hub id"
    )
    format: Literal["transformers", "fast_dllm_v2"] = Field(
        "transformers",
        description="layout of the folder: the base model's own class with block_diffusion in config.json, or that of "
        "the published Fast-dLLM v2 checkpoints (Qwen2 only)",
    )
    dtype: Literal["model", "bfloat16", "float32"] = Field(
        "model",
        description="number format of the weights; model: what config.json says. A checkpoint's master copy is float32",
    )
    shard_bytes: int = Field(
        5_000_000_000, ge=1_000_000, description="largest safetensors file in bytes; a larger model gets several"
    )
    verify: bool = Field(
        True,
        description="load the folder in a fresh process and compare logits before it is published",
        json_schema_extra=NOT_IDENTITY,
    )


@dataclass(frozen=True)
class Source:
    """A model in memory, the folder that describes it, and the step of its checkpoint (None: it is no checkpoint)."""

    backbone: Backbone
    described: Path
    step: int | None


def run(config: ExportConfig) -> dict[str, Any]:
    """Export, prove, publish; returns the figures."""
    with OutputFolder(str(config.output), job="export", config=config, inputs=_inputs(config)) as output:
        if output.finished is None:
            try:
                _refuse_foreign(output)
                output.finish(_export(config, output))
            except UserError:
                output.forget()
                raise
        else:
            print(f"export: {config.output} is complete already", flush=True)
        assert output.finished is not None
        figures: dict[str, Any] = output.finished["figures"]
    return figures


def plan(config: ExportConfig) -> dict[str, Any]:
    """What --dry-run prints; reads configs, no weights."""
    source = _source_of(config)
    with _described(source) as (folder, step):
        if is_two_tower(folder):
            towers = open_towers(folder, config.format, config.adapter)
            return {"source": f"two towers, denoiser {towers.config.denoiser}", "writes": sorted(towers.networks)}
        kind = read_architecture(folder).architectures or ["unknown"]
        return {"source": "model" if step is None else f"checkpoint of step {step}", "class": kind[0]}


def _refuse_foreign(output: OutputFolder) -> None:
    """Raises UserError where the output holds something that no export put there, such as the model itself."""
    if output.resumed:
        return
    names = [
        str(place).rstrip("/").rpartition("/")[2] for place in output.filesystem.ls(output.place(""), detail=False)
    ]
    foreign = sorted(name for name in names if not name.startswith("."))
    if foreign:
        raise UserError(
            f"--output {output.target} holds {foreign[0]}, which no export wrote and this one might overwrite: name an "
            "empty or a new folder."
        )


def _source_of(config: ExportConfig) -> str:
    if config.data:
        raise UserError("export reads --model, not --data: leave --data out.")
    if config.model is None:
        raise UserError("--model is required: a checkpoint (<output of adapt>/checkpoints/step_N) or a model.")
    folder = Path(config.model)
    if (folder / "checkpoints").is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"--model {config.model} is the output of adapt: give its model/ or one of its checkpoints/step_N."
        )
    if folder.parent.name == FOLDER and folder.is_dir() and not (folder / COMMIT).is_file():
        raise UserError(
            f"--model {config.model} holds no {COMMIT}: its run did not finish writing this checkpoint; "
            "take an earlier one, or run adapt again."
        )
    return config.model


def _inputs(config: ExportConfig) -> dict[str, str]:
    source = _source_of(config)
    if is_checkpoint(source):
        inputs = {"--model": hash_file(f"{source.rstrip('/')}/{COMMIT}")}
    else:
        folder = fetch_model(source)
        if is_two_tower(folder):
            open_towers(folder, config.format, config.adapter)
            return {"--model": model_revision(folder)}
        read_architecture(folder)
        inputs = {"--model": revision_of(folder)}
    return inputs if config.adapter is None else {**inputs, "--adapter": adapter_revision(config.adapter)}


@contextlib.contextmanager
def _described(source: str) -> Iterator[tuple[Path, int | None]]:
    """The folder with config and tokenizer, and a checkpoint's step."""
    if not is_checkpoint(source):
        yield fetch_model(source), None
        return
    with open_checkpoint(source) as opened:
        yield _one_network(opened), opened.step


def _one_network(opened: OpenCheckpoint) -> Path:
    """The folder with config and tokenizer. Raises UserError for a checkpoint of two towers."""
    if is_two_tower(opened.description):
        raise UserError(
            "This checkpoint holds the denoiser of two towers, which is no model alone: run adapt to its end and "
            "export model/denoiser or model/context."
        )
    return opened.description


@contextlib.contextmanager
def _loaded(config: ExportConfig) -> Iterator[Source]:
    """The model in memory, with the adapter merged, in the format that is to be written."""
    source = _source_of(config)
    if not is_checkpoint(source):
        folder = fetch_model(source)
        dtype = _dtype(config, folder)
        yield Source(load_backbone(source, dtype=dtype, adapter=config.adapter), folder, None)
        return
    with open_checkpoint(source) as opened:
        described = _one_network(opened)
        dtype = _dtype(config, described)
        weights = opened.weights(dtype)
        backbone = load_backbone(described, dtype=dtype, adapter=config.adapter, weights=weights)
        yield Source(backbone, described, opened.step)


def _dtype(config: ExportConfig, described: Path) -> torch.dtype:
    """Raises UserError for a format that export does not write."""
    if config.dtype != "model":
        return DTYPES[config.dtype]
    found = read_architecture(described).dtype or torch.float32
    if found not in (torch.float32, torch.bfloat16):
        raise UserError(f"{config.model} is in {found}: say --dtype bfloat16 or --dtype float32.")
    return found


def _export(config: ExportConfig, output: OutputFolder) -> dict[str, Any]:
    """Write aside, prove, give every file its name."""
    place = output.path if output.local else None
    with tempfile.TemporaryDirectory(prefix=".export-", dir=place) as scratch:
        written = Path(scratch, "model")
        source = _source_of(config)
        if not is_checkpoint(source) and is_two_tower(folder := fetch_model(source)):
            figures = _export_towers(config, open_towers(folder, config.format, config.adapter), written)
        else:
            with _loaded(config) as loaded:
                figures = _export_network(config, loaded, written)
        _publish(written, output)
    return figures


def _export_network(config: ExportConfig, source: Source, written: Path) -> dict[str, Any]:
    """One network into the folder `written`, whose own folder has room for the probe."""
    backbone = source.backbone
    check_layout(config.format, backbone)
    print(f"export: writing {type(backbone.model).__name__} in {_name(backbone.model.dtype)}", file=sys.stderr)
    probe = probe_of(backbone.model, config.seed) if config.verify else {}
    write_layout(config.format, backbone, source.described, written, config.shard_bytes)
    proof = prove(written, probe, written.parent, loader_of(config.format, backbone)) if config.verify else None
    figures = _figures(config, source, written, proof)
    _say(config, figures, proof)
    return figures


def _export_towers(config: ExportConfig, towers: Towers, written: Path) -> dict[str, Any]:
    """A tower at a time: context tower and denoiser are never in memory together."""
    written.mkdir()
    found = {}
    for name, folder in towers.networks.items():
        told = config.model_copy(update={"model": str(folder), "output": f"{config.output}/{name}"})
        with _loaded(told) as loaded:
            found[name] = _export_network(told, loaded, written / name)
    towers.write_rest(written)
    print(f"export: {config.output}: two towers, denoiser {towers.config.denoiser}. {HINT}", flush=True)
    return {"format": config.format, "step": None, "denoiser": towers.config.denoiser, "towers": found}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _publish(written: Path, output: OutputFolder) -> None:
    for file in sorted(written.iterdir()):
        with output.stage(file.name) as place:
            shutil.move(file, place)


def _figures(config: ExportConfig, source: Source, written: Path, proof: Proof | None) -> dict[str, Any]:
    model = source.backbone.model
    weights = sorted(written.glob("*.safetensors"))
    return {
        "class": type(model).__name__,
        "format": config.format,
        "step": source.step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": _name(model.dtype),
        "weight_files": len(weights),
        "weight_bytes": sum(path.stat().st_size for path in weights),
        "verified": proof is not None,
        "largest_difference": None if proof is None else proof.difference,
        "largest_logit": None if proof is None else proof.largest,
    }


def _say(config: ExportConfig, figures: dict[str, Any], proof: Proof | None) -> None:
    size = f"{figures['parameters']:,} parameters in {figures['dtype']}"
    print(f"export: {config.output}: {figures['class']}, {size}, {figures['format']} layout", flush=True)
    print(f"export: {proof.text if proof else 'not verified (--verify false)'}", flush=True)


if __name__ == "__main__":
    sys.exit(main("export", ExportConfig, run, plan))
