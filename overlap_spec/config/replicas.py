"""`ReplicaFlags`: how many engines Ray Serve runs, on what, and which of them gets a request."""

from typing import Annotated

from msgspec import Meta, Struct


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
