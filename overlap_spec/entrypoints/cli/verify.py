"""`overlap-spec verify [PROMPTS.jsonl]`: run prompts with speculation, and every one of them again by plain decoding.

Status 0: no token differs beyond near-ties; 1: a fault, or a prompt that could not be audited; 2: bad input.

The prompts are a file with one JSON object in each line, of the names that `/generate` has. A field that is not known
is refused: a parameter that was misspelt would prove nothing.

    {"messages": [{"role": "user", "content": "Why?"}], "sampling_params": {"temperature": 0.8, "max_new_tokens": 64}}

The report has figures, every difference with its margin, and how to run a fault again.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from overlap_spec.client import Client
from overlap_spec.client.calls import Completion
from overlap_spec.config import EngineConfig
from overlap_spec.config.keys import write_private
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.flags import (
    ONLY_SERVED,
    UsageError,
    add_engine_flags,
    engine_config,
    refuse_bench_flags,
    refuse_flags,
    result_file,
)
from overlap_spec.entrypoints.cli.progress import shown_progress
from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED, Json
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_body import convert, without_nulls
from overlap_spec.entrypoints.http.request_runner import renamed
from overlap_spec.entrypoints.native.generate import SAMPLING, NativeSampling, read_sampling
from overlap_spec.entrypoints.openai.prompts import check_chat, read_ids, read_text
from overlap_spec.errors import OverlapSpecError, RequestError
from overlap_spec.messages import AuditReport, ChatPrompt, Difference, Prompt, SamplingParams
from overlap_spec.version import __version__

SHIPPED = Path(__file__).parents[2] / "data" / "prompts" / "verify10.jsonl"
PROMPTS = ("text", "messages", "input_ids")


class Line(msgspec.Struct, kw_only=True):
    """One line. It has one of `text`, `messages` and `input_ids`."""

    text: str | None = None
    messages: list[Json] | None = None
    input_ids: list[int] | None = None
    sampling_params: Json = {}


class BadLine(UsageError):
    """A line cannot be run. The message names file, line and field."""

    def __init__(self, where: str, error: Problem | RequestError) -> None:
        name, text = error.param if isinstance(error, Problem) else error.field, str(error)
        super().__init__(f"{where}: {text if not name or text.startswith(name) else f'{name}: {text}'}")


@dataclass(frozen=True)
class VerifyPrompt:
    """One prompt. `where`: its file and line; `given`: its sampling parameters as they were written."""

    where: str
    kind: str  # the field that has the prompt
    prompt: Prompt
    sampling: SamplingParams
    given: dict[str, Any] = field(default_factory=dict)

    def refused(self, error: RequestError) -> BadLine:
        """What to say if the engine does not take the request."""
        return BadLine(self.where, renamed(error, {"prompt": self.kind}))


def read_prompt_file(path: Path, skip_tokenizer_init: bool = False) -> list[VerifyPrompt]:
    """Read and check all lines but empty ones. Raises: UsageError naming the line and the field."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    info = _what_is_known(skip_tokenizer_init)
    prompts = [_read(line, f"{path}, line {number}", info) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"{path}: has no prompts")
    return prompts


def _what_is_known(skip_tokenizer_init: bool) -> ServerInfo:
    """What checks need to know before an engine has started, which itself checks lengths and the vocabulary."""
    return ServerInfo(
        model_name="",
        model_path="",
        tokenizer_path=None,
        max_model_len=1 << 31,
        max_running_requests=0,
        version=__version__,
        skip_tokenizer_init=skip_tokenizer_init,
    )


def _read(line: bytes, where: str, info: ServerInfo) -> VerifyPrompt:
    try:
        fields = msgspec.json.decode(line, type=Json)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not a JSON object: {error}") from None
    try:
        return _checked(fields, where, info)
    except (Problem, RequestError) as error:
        raise BadLine(where, error) from None


def _checked(fields: Json, where: str, info: ServerInfo) -> VerifyPrompt:
    for name in fields.keys() - set(Line.__struct_fields__):
        hint = "belongs in sampling_params" if name in SAMPLING else f"not one of {', '.join(Line.__struct_fields__)}"
        raise Problem(400, f"{name}: {hint}", name)
    line = convert(without_nulls(fields), Line)
    given = [name for name in PROMPTS if getattr(line, name) is not None]
    if len(given) != 1:
        raise Problem(400, f"give one of {', '.join(PROMPTS)}, got {' and '.join(given) or 'none'}", "text")
    return VerifyPrompt(where, given[0], _prompt(line, info), _sampling(line, info), line.sampling_params)


def _prompt(line: Line, info: ServerInfo) -> Prompt:
    if line.messages is not None:
        return check_chat(ChatPrompt(line.messages), info)
    if line.text is not None:
        return read_text(line.text, "text", info)
    return read_ids(line.input_ids, "input_ids", info)


def _sampling(line: Line, info: ServerInfo) -> SamplingParams:
    n, sampling, _ = read_sampling(line.sampling_params, info)
    if n != 1:
        raise Problem(400, f"n: one answer is verified for each line, got {n}; write the line {n} times", "n")
    for name in line.sampling_params.keys() - set(NativeSampling.__struct_fields__) - set(UNSUPPORTED):
        raise Problem(400, f"{name}: not a parameter of /generate's sampling_params", name)
    return sampling


PLAIN_WIDTH = 140  # columns where stdout is no terminal
SEEDS = ("seed", "sampling_seed")  # the names of the seed


@dataclass(frozen=True)
class Verified:
    """Prompts that have been answered and audited. `texts`: of the tokens that differ, by id.

    `records`: the lines of the fault file, each of one request, with all that is needed to run it again.
    """

    prompts: Sequence[VerifyPrompt]
    answers: Sequence[Completion]
    audit: AuditReport
    engine: dict[str, Any]
    texts: dict[int, str]
    records: Sequence[dict[str, Any]] = ()

    @classmethod
    async def of(
        cls, engine: Engine, prompts: Sequence[VerifyPrompt], answers: Sequence[Completion], audit: AuditReport
    ) -> Self:
        """Adds what is read from the engine and from the fault file."""
        texts = {} if engine.config.skip_tokenizer_init else await _texts(engine.client, audit.recent)
        return cls(prompts, answers, audit, _described(engine), texts, _records(audit))

    @property
    def not_audited(self) -> int:
        """Prompts with tokens that plain decoding has not run again."""
        return sum(1 for answer in self.answers if answer.token_ids) - self.audit.figures.requests

    @property
    def status(self) -> int:
        """The exit status: 0 only if every token was audited and there is no fault."""
        figures = self.audit.figures
        return 1 if figures.faults or self.not_audited or not figures.tokens else 0

    @property
    def tokens_per_step(self) -> float | None:
        """Committed tokens of a verify step, bonus included; None without such steps."""
        steps = sum(answer.usage.spec_verify_ct for answer in self.answers)
        drafted = [answer for answer in self.answers if answer.usage.spec_verify_ct]
        return sum(answer.usage.completion_tokens - 1 for answer in drafted) / steps if steps else None

    def where(self, request_id: str) -> str:
        """File and line of a request."""
        return self.prompts[int(request_id)].where

    def again(self, record: dict[str, Any]) -> dict[str, Any]:
        """A line for PROMPTS.jsonl that runs a faulty request again, with the seed that it had."""
        given = self.prompts[int(record["faults"][0]["request_id"])].given
        parameters = {name: value for name, value in given.items() if name not in SEEDS}
        return {
            "input_ids": record["prompt_ids"],
            "sampling_params": parameters | {"seed": record["sampling"]["seed"]},
        }


def report_of(verified: Verified) -> dict[str, Any]:
    """The report as JSON."""
    audit = verified.audit.as_json()
    return {
        "status": verified.status,
        "engine": verified.engine,
        "prompts": len(verified.prompts),
        "not_audited": verified.not_audited,
        "tokens_per_step": verified.tokens_per_step,
        "audit": audit,
        "differences": [{"where": verified.where(each["request_id"]), **each} for each in audit["recent"]],
        "faults": [{"run_again": verified.again(record), **record} for record in verified.records],
    }


def print_verified(verified: Verified) -> None:
    """Print figures, differences, faults and the verdict to stdout."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, markup=False)
    console.print(_figures(verified))
    if verified.audit.recent:
        console.print(_differences(verified))
    for record in verified.records:
        print(f"\n{verified.where(record['faults'][0]['request_id'])}: to run it again, verify this line:")
        print(msgspec.json.encode(verified.again(record)).decode())
    print(f"\n{_verdict(verified)}", flush=True)


def _figures(verified: Verified) -> Table:
    audit, figures = verified.audit, verified.audit.figures
    per_step = verified.tokens_per_step
    table = Table(show_header=False, title="overlap-spec verify")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    drafted = f", {per_step:.2f} in a step with guesses" if per_step is not None else ", none of them guessed"
    rows = {
        "engine": ", ".join(f"{verified.engine[name]}" for name in ("model", "method", "dtype", "device")),
        "prompts": f"{figures.requests} of {len(verified.prompts)} audited" + _reasons(audit),
        "tokens": f"{figures.tokens}{drafted}",
        "near-ties": f"{figures.near_ties}, {audit.near_ties_per_10k:.2f} per 10,000 tokens; plain decoding against"
        f" itself at another batch size: {audit.control_per_10k:.2f}",
        "noise": f"margins up to {figures.bound:.2g} logits are a near-tie's",
        "faults": str(figures.faults),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _reasons(audit: AuditReport) -> str:
    reasons = {**audit.dropped_because, **audit.skipped_because}
    return "".join(f"; {count} not: {reason}" for reason, count in reasons.items())


def _differences(verified: Verified) -> Table:
    columns = ("", "where", "position", "step", "served", "plain decoding", "margin", "in a second run")
    table = Table(*columns, title="tokens that plain decoding does not draw; margins in logits")
    for each in verified.audit.recent:
        table.add_row(
            "FAULT" if each.is_fault else "near-tie",
            verified.where(each.request_id),
            str(each.position),
            str(each.step_id),
            _token(each.served, verified.texts),
            _token(each.drawn, verified.texts),
            "forbidden" if each.margin is None else f"{each.margin:.3g}",
            "" if each.control_margin is None else f"{each.control_margin:.3g}",
        )
    return table


def _token(token: int, texts: dict[int, str]) -> str:
    return f"{token} {texts[token]!r}" if token in texts else str(token)


def _verdict(verified: Verified) -> str:
    audit, figures = verified.audit, verified.audit.figures
    if figures.faults:
        written = f"; all that reproduces them is in {audit.fault_file}" if audit.fault_file else ""
        return f"FAULTS: {figures.faults} tokens are not plain decoding's{written}"
    if verified.not_audited or not figures.tokens:
        return f"NOT VERIFIED: {verified.not_audited} prompts were not audited, {figures.tokens} tokens were"
    return "Every token is plain decoding's" + (", near-ties aside." if figures.near_ties else ".")


def _described(engine: Engine) -> dict[str, Any]:
    from overlap_spec.runtime.source import describe_source

    settings = engine.settings
    spec, model = settings.spec, settings.model
    numbers = f" ({spec.num_steps}, {spec.topk}, {spec.width})" if spec.num_steps else ""
    return {
        "model": model.name,
        "method": spec.method + numbers,
        "dtype": model.dtype,
        "device": engine.facts.worker.device,
        "logit_processor": settings.logit_processor,
        **describe_source().describe(),
    }


async def _texts(client: Client, differences: Sequence[Difference]) -> dict[int, str]:
    tokens = {token for each in differences for token in (each.served, each.drawn)}
    return {token: await client.detokenize([token]) for token in sorted(tokens)}


def _records(audit: AuditReport) -> list[dict[str, Any]]:
    """The newest lines of the fault file, which may have been there before."""
    if audit.fault_file is None:
        return []
    lines = Path(audit.fault_file).read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines[-audit.faults_written :]]


QUIET = "error"  # log level without --log-level: the report names every fault
AT_ONCE = 256  # prompts whose audits may wait; the audit's backlog takes more
POLL_S = 0.05

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompts, where the report goes, and the engine's flags."""
    parser.add_argument("prompts", nargs="?", metavar="PROMPTS.jsonl", help="default: ten prompts that ship")
    parser.add_argument("--output", type=result_file, metavar="FILE", help="write the report to this JSON file")
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
