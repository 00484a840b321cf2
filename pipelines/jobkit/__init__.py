"""What every job needs and none should write again: configuration, command line, outputs, manifests, progress, Ray."""

from pipelines.jobkit.cli import main
from pipelines.jobkit.cluster import connect_ray
from pipelines.jobkit.identity import config_hash, hash_inputs
from pipelines.jobkit.output import OutputFile, OutputFolder
from pipelines.jobkit.progress import Progress
from pipelines.jobkit.resolve import default_output
from pipelines.jobkit.sections import (
    NOT_IDENTITY,
    ClusterConfig,
    DecodeSection,
    EngineSection,
    JobConfig,
    PackConfig,
    ReadConfig,
    Section,
)

__all__ = [
    "NOT_IDENTITY",
    "ClusterConfig",
    "DecodeSection",
    "EngineSection",
    "JobConfig",
    "OutputFile",
    "OutputFolder",
    "PackConfig",
    "Progress",
    "ReadConfig",
    "Section",
    "config_hash",
    "connect_ray",
    "default_output",
    "hash_inputs",
    "main",
]
