"""What the process that this runs in is called."""

from __future__ import annotations

from ray import serve
from ray.serve.exceptions import RayServeException

OUTSIDE = "local"


def replica_name() -> str:
    """The short id that Serve gave this replica; "local" outside of Serve."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return OUTSIDE
