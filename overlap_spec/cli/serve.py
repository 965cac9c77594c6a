"""`overlap-spec serve`: the command. Not here: the life of the service (`service.py`), routes (`server/`)."""

import argparse
import ipaddress
import logging

from overlap_spec.cli.flags import add_engine_flags, engine_config, refuse_bench_flags
from overlap_spec.config import asks_for_spec_v2

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags are the engine's."""
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal or a failure. Returns the exit status."""
    config = engine_config(arguments)
    refuse_bench_flags(config)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s server: %(message)s")
    if asks_for_spec_v2():
        log.info("SGLANG_ENABLE_SPEC_V2 is set: overlap is always on here")
    if config.api_key is None and not is_loopback(config.host):
        log.warning("--host %s is reachable from other machines, and there is no --api-key", config.host)

    import uvloop

    from overlap_spec.cli.service import serve

    return uvloop.run(serve(config))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server on that address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
