"""How many replicas a backlog of query tokens needs: Serve asks this policy about ten times a second.

Between two bounds nothing changes, so a load at the edge of a replica does not make it come and go:

    more    when the backlog is above what the replicas there are may have (`target_backlog_tokens` each)
    fewer   when the rest would stay `slack` below that

Serve itself waits `upscale_delay_s` and `downscale_delay_s` before it believes an answer. A replica that has not said
what it has to do lately counts as busy: nothing is taken away before all have spoken, nor before the first one runs.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from actors.engine.backlog import BACKLOG
from actors.serve_args import ServeArgs

POLICY = "actors.serving.autoscaling:BacklogPolicy"
LOOK_BACK, STALE = 3.0, 10.0  # in reports: how far Serve's own averages reach; and when a report is too old
IN_FLIGHT = 0.5  # requests at the handles, on average: readiness probes are fewer, a real request is more


def autoscaling_config(args: ServeArgs) -> AutoscalingConfig:
    """Serve's settings for a deployment that follows its backlog.

    Where all replicas may go, one starts at once nevertheless: a model that does not load fails the deployment, not the
    first request. Elsewhere Serve keeps, when it deploys again, as many as there are.
    """
    scaling = args.scaling
    with warnings.catch_warnings():  # metrics_interval_s: its successor is an environment variable of every node
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=args.min_replicas,
            initial_replicas=None if args.min_replicas else 1,
            max_replicas=args.max_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            downscale_to_zero_delay_s=scaling.idle_delay_s,
            metrics_interval_s=scaling.report_s,
            look_back_period_s=LOOK_BACK * scaling.report_s,
            policy=AutoscalingPolicy(
                policy_function=POLICY,
                policy_kwargs={
                    "target_backlog_tokens": scaling.target_backlog_tokens,
                    "slack": scaling.slack,
                    "stale_s": STALE * scaling.report_s,
                },
            ),
        )


def replicas_for(backlog: float, current: int, *, target: float, slack: float) -> int:
    """Replicas for a backlog in query tokens when there are `current` now."""
    needed = math.ceil(backlog / target)
    if needed > current:
        return needed
    return min(current, math.ceil(backlog / (target * (1 - slack))))


class BacklogPolicy:
    """Serve's custom policy. target_backlog_tokens: of one replica; slack: in [0, 1); stale_s: an older report is none.

    Bounds and delays are Serve's own; it keeps no state, so a restarted controller goes on where it was.
    """

    def __init__(self, target_backlog_tokens: float, slack: float, stale_s: float) -> None:
        self.target_backlog_tokens = target_backlog_tokens
        self.slack = slack
        self.stale_s = stale_s

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(desired replicas, no state)."""
        current = ctx.target_num_replicas
        reports = self._reports(ctx)
        backlog = sum(reports)
        desired = replicas_for(backlog, current, target=self.target_backlog_tokens, slack=self.slack)
        if not ctx.running_replicas or len(reports) < len(ctx.running_replicas):
            desired = max(desired, current)
        busy = backlog > 0 or ctx.total_queued_requests > 0 or ctx.total_num_requests >= IN_FLIGHT
        return max(desired, 1 if busy else 0), {}

    def _reports(self, ctx: AutoscalingContext) -> list[float]:
        """The latest backlog of each running replica that has said one lately, in query tokens."""
        series = (ctx.raw_metrics or {}).get(BACKLOG, {})
        newest = [series[replica][-1] for replica in ctx.running_replicas if series.get(replica)]
        now = ctx.current_time or 0.0
        return [point.value for point in newest if now - point.timestamp <= self.stale_s]
