"""`overlap-spec verify [PROMPTS.jsonl]`: run prompts with speculation, and every one of them again by plain decoding.

Status 0: no token differs beyond near-ties; 1: a fault, or a prompt that could not be audited; 2: bad input.
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from msgspec.structs import replace

from overlap_spec.client import Client
from overlap_spec.client.calls import Completion
from overlap_spec.config import EngineConfig
from overlap_spec.config.private_files import write_private
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.flag_groups import ONLY_SERVED
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config, refuse_bench_flags, refuse_flags
from overlap_spec.entrypoints.cli.progress import shown_progress
from overlap_spec.entrypoints.cli.verify_prompts import SHIPPED, VerifyPrompt, read_prompt_file
from overlap_spec.entrypoints.cli.verify_report import Verified, print_verified, report_of
from overlap_spec.errors import OverlapSpecError, RequestError
from overlap_spec.messages import AuditReport

QUIET = "error"  # log level without --log-level: the report names every fault
AT_ONCE = 256  # prompts whose audits may wait; the audit's backlog takes more
POLL_S = 0.05

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompts, where the report goes, and the engine's flags."""
    parser.add_argument("prompts", nargs="?", metavar="PROMPTS.jsonl", help="default: ten prompts that ship")
    parser.add_argument("--output", metavar="FILE", help="write the report to this JSON file")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    refuse_flags(arguments, ("audit_rate", "audit_action"), "verify audits every prompt")
    refuse_flags(arguments, ONLY_SERVED, "verify starts no HTTP server")
    config = replace(engine_config(arguments, log_level=QUIET), audit_rate=1.0)
    refuse_bench_flags(config)
    path = SHIPPED if arguments.prompts is None else Path(arguments.prompts)
    prompts = read_prompt_file(path, config.skip_tokenizer_init)
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s: %(message)s")
    _say(f"verify: starting {config.model_path} for {len(prompts)} prompts of {path}")
    import uvloop  # the event loop of `serve`

    verified = uvloop.run(_verify(config, prompts))
    print_verified(verified)
    if arguments.output:
        from overlap_spec.bench.report import as_text

        write_private(Path(arguments.output), as_text(report_of(verified)).encode())  # it holds prompts
    return verified.status


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


async def _verify(config: EngineConfig, prompts: list[VerifyPrompt]) -> Verified:
    engine = Engine(config)
    try:
        with shown_progress(_say) as engine.progress:
            await engine.start()
        for note in engine.notes:
            log.info("%s", note)
        answers, audit = await run_audited(engine.client, prompts)
        return await Verified.of(engine, prompts, answers, audit)
    finally:
        await engine.stop()


async def run_audited(client: Client, prompts: list[VerifyPrompt]) -> tuple[list[Completion], AuditReport]:
    """Answer all prompts, in groups, and wait for the audits of each group.

    Raises: BadLine for a prompt that the engine refuses, OverlapSpecError if it audits nothing.
    """
    answers: list[Completion] = []
    report = await client.audit()
    if report.why_off:
        raise OverlapSpecError(f"nothing can be verified: {report.why_off}")
    for first in range(0, len(prompts), AT_ONCE):
        group = prompts[first : first + AT_ONCE]
        answers += await asyncio.gather(*(_complete(client, first + i, prompt) for i, prompt in enumerate(group)))
        while (report := await client.audit()).figures.backlog:
            await asyncio.sleep(POLL_S)
    return answers, report


async def _complete(client: Client, index: int, prompt: VerifyPrompt) -> Completion:
    try:
        return await client.complete(prompt.prompt, prompt.sampling, str(index))
    except RequestError as error:
        raise prompt.refused(error) from None
