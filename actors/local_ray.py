"""Starting a Ray of our own: the one place that knows how Ray says it could not."""

from __future__ import annotations

from typing import Any

from model.errors import JobError

NODE_TIMED_OUT = "timed out during startup"


def init_ray(**options: Any) -> Any:
    """`ray.init(**options)`. Raises JobError where a local Ray did not start in Ray's own time, which is 30 s."""
    import ray

    try:
        return ray.init(**options)
    except ConnectionError:
        raise
    except Exception as error:  # Ray has no type for it
        if NODE_TIMED_OUT not in str(error):
            raise
        raise JobError("Ray did not start in 30 s: the machine is overloaded; free it and run this again.") from None
