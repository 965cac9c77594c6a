"""How many replicas there should be, as a policy of Ray Serve's autoscaling.

Serve counts requests, and assumes that a replica can run as many as another. Long prompts fill the KV pool before they
fill the slots, and then requests wait in an engine that has few of them. Every replica reports both.
"""

from collections.abc import Mapping
from typing import Any

WAITING, RUNNING = "waiting", "running"  # what a replica reports


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """The replicas that the open requests need; Serve adds bounds and delays. `context`: its AutoscalingContext.

    Of the requests that an engine can run at a time, a replica in which requests wait is the measure.
    """
    if not context.current_num_replicas:
        return context.target_num_replicas, {}
    by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    return max(by_requests, _by_waiting(context.aggregated_metrics or {}, context.current_num_replicas)), {}


def _by_waiting(metrics: Mapping[str, Mapping[Any, float]], num_replicas: int) -> float:
    waiting, running = metrics.get(WAITING, {}), metrics.get(RUNNING, {})
    more = sum(count / max(1.0, running.get(replica, 0.0)) for replica, count in waiting.items())
    return num_replicas + more if more else 0.0
