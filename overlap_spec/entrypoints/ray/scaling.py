"""How many replicas there should be, as a policy of Ray Serve's autoscaling.

Serve's own policy divides the open requests by a fixed number for each replica. Long prompts fill the KV pool before
they fill the slots: then an engine runs fewer. So each replica reports what runs and what waits in its engine, and one
in which requests wait shows how many it can run.
"""

from collections.abc import Mapping
from typing import Any

WAITING, RUNNING = "waiting", "running"  # what a replica reports
CAPACITY = "capacity"  # in the policy's state: requests that a full engine has run


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """The replicas that the open requests need, and the state to keep. `context`: Serve's AutoscalingContext.

    Serve applies bounds and delays to it.
    """
    if not context.current_num_replicas:
        return context.target_num_replicas, {}
    capacity = _capacity(context.aggregated_metrics or {}, context.policy_state.get(CAPACITY))
    target = context.config.get_target_ongoing_requests()
    if capacity is None:
        return context.total_num_requests / target, {}
    return context.total_num_requests / min(target, capacity), {CAPACITY: capacity}


def _capacity(metrics: Mapping[str, Mapping[Any, float]], known: float | None) -> float | None:
    """What a full engine runs; None as long as none was full. One that runs more without a queue corrects it."""
    waiting, running = metrics.get(WAITING, {}), metrics.get(RUNNING, {})
    full = [running.get(replica, 0.0) for replica, count in waiting.items() if count >= 1]
    if full:
        return max(1.0, sum(full) / len(full))
    return known if known is None else max(known, *running.values(), 1.0)
