"""`overlap-spec train-draft`: make a draft for a model from prompts alone.

    overlap-spec train-draft --model-path M --method EAGLE3 --prompts FILE.jsonl --output DIR --time-limit 8m

The engine answers the prompts in this process, and its hidden states teach the draft on the same device. `--resume`
goes on with what DIR holds. Status 2: a wrong flag, prompt or file, a disk that is full, too little time.
"""

import argparse
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from overlap_spec.config import EngineConfig, facts_of
from overlap_spec.config.fields import config_fields
from overlap_spec.config.resolve import resolve
from overlap_spec.config.speculation import BLOCK_FLAGS, methods_where
from overlap_spec.entrypoints.cli.flags import UsageError, add_flag, engine_config, flag_name
from overlap_spec.entrypoints.cli.progress import shown_progress
from overlap_spec.hub import resolve_model
from overlap_spec.messages import NO_METHOD
from overlap_spec.runtime import machine
from overlap_spec.runtime.supervisor import Progress

if TYPE_CHECKING:
    from overlap_spec.train_draft.loop import Report, Run

FLAGS = (  # the engine's that go with training
    *("model_path", "revision", "tokenizer_path", "load_format", "quantization", "dtype", "device", "chat_template"),
    *("context_length", "mem_fraction_static", "max_total_tokens", "max_running_requests", "disable_cuda_graph"),
    "random_seed",
)
TRAINED = tuple(methods_where("is_trained"))
MOST_CONTEXT = 1024  # tokens of a prompt and its answer, where --context-length does not say
READ_TOGETHER = 16384  # rows of a prefill step on a GPU; answers end long before a model's context does
MEMORY = 0.4  # of a GPU's, for weights and caches: training needs the rest
RUNNING = 512  # answers at once on a GPU
EVERY_S = 5.0  # between lines
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, from what, for how long, and the engine's flags that go with it."""
    parser.add_argument("--method", required=True, metavar="|".join(TRAINED), help="the method that drafts with it")
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl", help="a chat or a text in each line")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the draft is written")
    parser.add_argument("--time-limit", default="8m", metavar="T", help="of the command: 90s, 8m, 1h (default: 8m)")
    parser.add_argument("--resume", action="store_true", help="go on with what DIR holds")
    parser.add_argument("--max-steps", type=int, metavar="N", help="of training, if the time does not end before")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (default: 256)")
    parser.add_argument("--draft-vocab-size", type=int, metavar="N", help="tokens that a chain guesses among")
    for name, block in BLOCK_FLAGS.items():
        parser.add_argument(flag_name(block.field), dest=name, type=int, metavar="N", help=f"{name}: rows of a block")
    parser.add_argument(
        "--speculative-draft-model-path",
        dest="begins_with",
        metavar="DIR",
        help="an EAGLE-3 head of this model to begin with (default: the model's last layer)",
    )
    parser.add_argument("--learning-rate", type=float, metavar="X", help="default: by the target's hidden size")
    group = parser.add_argument_group("engine")
    fields = {field.name: field for field in config_fields()}
    for name in FLAGS:
        add_flag(group, fields[name])


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    started = time.monotonic()
    check_arguments(arguments)
    limit_s = parse_seconds(arguments.time_limit)
    with shown_progress(_say) as progress:
        ready = _loaded(arguments, started, limit_s, progress)
    report = ready.run()
    _say(f"{arguments.output}: accept length {report.accept_length:.2f} on held-out prompts, {report.steps} steps")
    return 0


def _loaded(arguments: argparse.Namespace, started: float, limit_s: float, progress: Progress) -> "Run":
    """Prompts read and engine warm. Raises: UsageError, ConfigError, CheckpointError."""
    progress("importing torch", 0, 0)
    from overlap_spec.frontend.codec import load_codec
    from overlap_spec.train_draft.loop import Order, Run
    from overlap_spec.train_draft.prompts import read_prompts

    prompts = read_prompts(Path(arguments.prompts).expanduser(), int(getattr(arguments, "random_seed", 0)))
    if prompts.num_left_out:
        _say(f"{prompts.num_left_out} prompts are those of benchmarks: left out")
    found = machine.inspect()
    defaults: dict[str, Any] = {"speculative_algorithm": NO_METHOD, "log_level": "warning"}
    on_gpu = found.has_cuda and getattr(arguments, "device", "cuda") != "cpu"
    if on_gpu:
        defaults |= {"mem_fraction_static": MEMORY, "max_running_requests": RUNNING}
        defaults |= {"chunked_prefill_size": READ_TOGETHER}
    config: EngineConfig = engine_config(arguments, **defaults)
    files = resolve_model(config, progress)
    most_tokens = config.context_length or min(MOST_CONTEXT, files.context_length)
    reads_together = on_gpu and config.context_length is None
    if config.context_length is None:
        context = READ_TOGETHER if on_gpu else MOST_CONTEXT
        config = replace(config, context_length=min(context, files.context_length))
        files = resolve_model(config, progress)
    settings, notes = resolve(config, files, found)
    if reads_together:  # a step has at most as many rows; no answer is as long as a model's context
        settings = replace(settings, model=replace(settings.model, max_len=READ_TOGETHER))
    for note in notes:
        _say(note)
    if files.tokenizer_dir is None:
        raise UsageError(f"--model-path: {config.model_path} has no tokenizer, and prompts are texts")
    codec = load_codec(Path(files.tokenizer_dir), files.chat_template)
    order = Order(
        method=arguments.method,
        output=Path(arguments.output).expanduser(),
        started=started,
        time_limit_s=limit_s,
        resume=arguments.resume,
        max_steps=arguments.max_steps or 0,
        most_tokens=most_tokens,
        max_new_tokens=arguments.max_new_tokens,
        draft_vocab_size=arguments.draft_vocab_size or 0,
        block_size=block_size(arguments),
        begins_with=arguments.begins_with or None,
        learning_rate=arguments.learning_rate or 0.0,
        seed=settings.scheduler.seed or 0,
    )
    return Run(order, settings, codec, prompts, Lines(progress))


def block_size(arguments: argparse.Namespace) -> int:
    """Rows; by default, of the method's usual window. 0: it guesses no blocks."""
    facts = facts_of(arguments.method)
    if facts.block is None or facts.numbers is None:
        return 0
    return getattr(arguments, arguments.method) or facts.numbers[0] + facts.block.first_guess


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises: UsageError naming what cannot be had."""
    method = arguments.method
    if method not in TRAINED:
        raise UsageError(f"--method: must be {' or '.join(TRAINED)}, got {method!r}")
    blocks = method in BLOCK_FLAGS
    for flag, value, goes in (
        ("--draft-vocab-size", arguments.draft_vocab_size, not blocks),
        ("--speculative-draft-model-path", arguments.begins_with, not blocks),
        *((flag_name(b.field), getattr(arguments, name), name == method) for name, b in BLOCK_FLAGS.items()),
    ):
        if value is not None and not goes:
            raise UsageError(f"{flag}: does not go with {method}; leave it out")
        if isinstance(value, int) and value < 2:
            raise UsageError(f"{flag}: must be at least 2, got {value}")
    if arguments.begins_with is not None and arguments.draft_vocab_size is not None:
        raise UsageError("--draft-vocab-size: a head to begin with has its own vocabulary; leave it out")
    for flag in ("--max-new-tokens", "--max-steps"):
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is not None and value < 1:
            raise UsageError(f"{flag}: must be at least 1, got {value}")
    if arguments.learning_rate is not None and not 0 < arguments.learning_rate < math.inf:
        raise UsageError(f"--learning-rate: must be a number above 0, got {arguments.learning_rate}")


def parse_seconds(text: str) -> float:
    """90, 90s, 1.5m, 1h. Raises: UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"--time-limit: must be seconds, or a number with s, m or h, got {text!r}")
    return seconds


class Lines:
    """Tells how far a run is: what it loads by `loading`, then a line every few seconds."""

    def __init__(self, loading: Progress) -> None:
        self.loading = loading
        self._said_at = -math.inf

    def answered(self, done: int, total: int, num_tokens: int) -> None:
        if self._is_time() or done == total:
            _say(f"answers: {done} of {total}, {num_tokens:,} tokens")

    def trained(self, report: "Report", left_s: float) -> None:
        if self._is_time() or left_s <= 0:
            _say(line_of(report, left_s))

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now - self._said_at < EVERY_S:
            return False
        self._said_at = now
        return True


def line_of(report: "Report", left_s: float) -> str:
    """Steps, loss, what held-out prompts say, and how long it goes on."""
    minutes, seconds = divmod(max(int(left_s), 0), 60)
    loss = "" if math.isnan(report.loss) else f"  loss {report.loss:.3f}"  # no step has been looked at yet
    return (
        f"step {report.steps}  {report.steps_per_s:.1f}/s{loss}"
        f"  accept length {report.accept_length:.2f} (untrained {report.untrained:.2f})"
        f"  {report.answer_tokens:,} tokens of {report.samples} answers  {minutes}:{seconds:02d} left"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
