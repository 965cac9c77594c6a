"""`overlap-spec serve-ray`: several engines on a Ray cluster, behind one address.

It joins the cluster that runs on this machine or that RAY_ADDRESS names, and starts one of this machine else. The first
signal ends the application: open requests have `--drain-timeout` seconds.
"""

import argparse
import re
import signal

from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_fields, flags_from
from overlap_spec.entrypoints.cli.flags import (
    add_engine_flags,
    add_flag,
    engine_config,
    given_values,
    refuse_bench_flags,
)
from overlap_spec.entrypoints.ray.scaling import ReplicaFlags
from overlap_spec.errors import OverlapSpecError
from overlap_spec.features import is_there

APPLICATION = "overlap-spec"
RAISED = re.compile(r"^overlap_spec\.errors\.\w+: (.+)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of replicas, then the engine's."""
    group = parser.add_argument_group("replicas")
    for field in config_fields(ReplicaFlags):
        add_flag(group, field)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit status. Raises: OverlapSpecError without Ray, or if no engine starts."""
    config = engine_config(arguments, recover=is_there("recovery"))
    refuse_bench_flags(config)
    replicas = flags_from(given_values(arguments, config_fields(ReplicaFlags)), ReplicaFlags)
    _serve(config, replicas)
    return 0


def _serve(config: EngineConfig, replicas: ReplicaFlags) -> None:
    try:
        from overlap_spec.entrypoints.ray import build_app
    except ImportError as error:
        raise OverlapSpecError(str(error)) from None

    import ray
    from ray import serve

    ray.init()
    application = build_app(config, replicas)
    serve.start(http_options={"host": config.host, "port": config.port})
    _interrupt_at_signals()
    try:
        serve.run(application, name=APPLICATION, route_prefix="/")  # logs the address
        while True:
            signal.pause()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        raise OverlapSpecError(f"no engine has started: {_cause(error)}") from None
    finally:
        _end()


def _cause(error: RuntimeError) -> str:
    """What a replica raised, which Serve keeps in a traceback of its status; else Serve's own words."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    messages = [deployment.message for deployment in application.deployments.values()] if application else []
    causes = [found[1] for text in messages if (found := RAISED.search(text))]
    return causes[0] if causes else str(error)


def _interrupt_at_signals() -> None:
    """Let every signal that ends the application raise KeyboardInterrupt. After `ray.init`, which has handlers too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, signal.default_int_handler)


def _end() -> None:
    """Drain the application; Serve ends with it if no other one runs there."""
    from ray import serve

    serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()
