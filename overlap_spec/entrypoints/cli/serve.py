"""`overlap-spec serve`: the command."""

import argparse
import logging

from overlap_spec.config import asked_otlp_protocol, asks_for_spec_v2
from overlap_spec.config.resolve import otlp_target
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config, refuse_bench_flags
from overlap_spec.features import is_there
from overlap_spec.runtime.log_limits import limit_lines

ACCESS_LOG = "overlap_spec.entrypoints.http.access_log"
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags."""
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal or a failure. Returns the exit status."""
    config = engine_config(arguments, recover=is_there("recovery"))
    refuse_bench_flags(config)
    if (collector := otlp_target(config, asked_otlp_protocol())) is not None:
        from overlap_spec.entrypoints.http.request_spans import open_spans

        open_spans(collector, "").close(0.0)  # is it installed? before slow imports
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s server: %(message)s")
    limit_lines()
    log.info("starting %s, on %s port %d", config.model_path, config.host, config.port)  # before slow imports
    if config.log_level_http is not None:
        logging.getLogger(ACCESS_LOG).setLevel(config.log_level_http.upper())
    for note in getattr(arguments, "granted", ()):
        log.info("%s", note)
    if asks_for_spec_v2():
        log.info("SGLANG_ENABLE_SPEC_V2 is set: overlap is always on here")

    import uvloop

    from overlap_spec.entrypoints.cli.service import serve

    return uvloop.run(serve(config))
