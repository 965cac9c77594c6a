"""How many replicas there are, on what: flags, and a policy of Ray Serve's autoscaling.

Serve's own policy divides the open requests by a fixed number for each replica. Long prompts fill the KV pool before
they fill the slots: then an engine runs fewer. So each replica reports what runs and what waits in its engine, and one
in which requests wait shows how many it can run.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

WAITING, RUNNING = "waiting", "running"  # what a replica reports
CAPACITY = "capacity"  # in the policy's state: requests that a full engine has run


class ReplicaFlags(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field per flag of `overlap-spec serve-ray` that is not the engine's. None means automatic."""

    num_replicas: Annotated[int, Meta(ge=1, description="engines, if their number is fixed; default: 1")] | None = None
    min_replicas: (
        Annotated[int, Meta(ge=1, description="fewest engines of autoscaling; default with --max-replicas: 1")] | None
    ) = None
    max_replicas: (
        Annotated[int, Meta(ge=1, description="most engines; with it, their number follows the requests")] | None
    ) = None
    target_ongoing_requests: (
        Annotated[
            float,
            Meta(gt=0, description="requests that an engine should have, by autoscaling; default: its slots, 48"),
        ]
        | None
    ) = None
    upscale_delay_s: Annotated[
        float, Meta(ge=0, description="seconds for which more engines are needed before they are started")
    ] = 30.0
    downscale_delay_s: Annotated[
        float, Meta(ge=0, description="seconds for which fewer engines are enough before one is drained")
    ] = 600.0
    num_gpus_per_replica: (
        Annotated[
            float,
            Meta(ge=0, description="GPUs of an engine; default: 1 where the cluster has some and --device is not cpu"),
        ]
        | None
    ) = None
    num_cpus_per_replica: Annotated[
        float, Meta(ge=0, description="processors of an engine, and on a CPU the threads of its worker")
    ] = 1.0
    prefix_routing: Annotated[
        bool, Meta(description="give requests that begin alike to the same engine, as long as their load is alike")
    ] = True
    num_ingress_replicas: Annotated[
        int, Meta(ge=1, description="processes that take the requests of Ray's HTTP proxies")
    ] = 1


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
