"""The origin that every result file records beside its figures: hardware, versions, commit and command.

Without these, two figures cannot be compared. Of an engine there are its settings, and the variants that a benchmark
compares it with: `plain`, the same without speculation, and `depth1`, the same with one step in flight.
"""

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from overlap_spec.config import EngineConfig, synthetic_acceptance
from overlap_spec.config.resolve import without_speculation
from overlap_spec.engine import Engine
from overlap_spec.runtime.machine import processor_name
from overlap_spec.runtime.source import describe_source

VERSIONED = ("overlap-spec", "torch", "triton", "cuda-bindings", "numpy", "transformers", "pyzmq", "msgspec")
LINE = 200  # of a result file, without the name of what is in it
NOT_RECORDED = ("--output",)  # flags that do not change what is measured

Serve = Callable[[Engine], AbstractAsyncContextManager[tuple[str, int]]]  # an engine's HTTP server: host and port


def describe_run(device: str, num_threads: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Facts of this machine, of the source that runs and of the command line that this process was started with.

    `device`: the worker's, as its start-up facts name it. `more`: paths in the repository that a figure depends on
    beside the packages (tests); the script that runs is one of them.
    """
    script = _script(sys.argv[0])
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "cpu": processor_name(),
        "num_threads": num_threads,
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONED if (version := _version(name))},
        **describe_source((*more, *((script,) if script else ()))).describe(),
        "command": recorded_command(sys.argv),
    }


def recorded_command(argv: Sequence[str]) -> str:
    """The command that repeats the measurement: a command line or a script, without `NOT_RECORDED`."""
    script = _script(argv[0])
    program = ["python", script] if script else ["overlap-spec"]
    words = zip(argv[1:], argv, strict=False)  # pairs of a word and the word before it
    kept = [word for word, before in words if not {before, word.partition("=")[0]} & set(NOT_RECORDED)]
    return shlex.join(program + kept)


def write_report(path: str, report: dict[str, Any]) -> None:
    """Write a result file, readable in a diff."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(as_text(report))


def as_text(report: Any) -> str:
    """What is in a result file: JSON, in which what fits into a line is on one line."""
    return _laid_out(report, 0) + "\n"


def _laid_out(value: Any, depth: int) -> str:
    """A value that begins behind `depth` spaces and its name."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or not value or depth + len(flat) <= LINE:
        return flat
    if isinstance(value, dict):
        items = [f"{json.dumps(str(name))}: {_laid_out(each, depth + 1)}" for name, each in value.items()]
    else:
        items = [_laid_out(each, depth + 1) for each in value]
    space = " " * depth
    return f"{flat[0]}\n" + ",\n".join(f"{space} {item}" for item in items) + f"\n{space}{flat[-1]}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _script(program: str) -> str | None:
    """The script's path in the repository; None for the command line `overlap-spec`."""
    path = Path(program).resolve()
    return f"{path.parent.name}/{path.name}" if path.suffix == ".py" and path.stem != "__main__" else None


def variants(config: EngineConfig, compared: Iterable[str]) -> dict[str, EngineConfig]:
    """The configured engine, and those named in `compared`: plain, depth1."""
    others = {"plain": without_speculation(config), "depth1": replace(config, disable_overlap_schedule=True)}
    return {"engine": config, **{name: others[name] for name in compared}}


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Hardware, versions, commit and command."""
    return describe_run(engine.facts.worker.device, engine.settings.num_threads)


def describe_settings(engine: Engine) -> dict[str, Any]:
    """The settings that a figure depends on."""
    settings = engine.settings
    spec = settings.spec
    return {
        "model": settings.model.name,
        "load_format": settings.model.files.load_format,
        "dtype": settings.model.dtype,
        "method": spec.method,
        "num_steps": spec.num_steps,
        "topk": spec.topk,
        "num_draft_tokens": spec.width,
        "narrower": list(spec.narrower),
        "acceptance": acceptance_of(engine),
        "depth": settings.scheduler.depth,
        "max_running_requests": settings.scheduler.max_running_requests,
        "prefix_cache": settings.cache.prefix_cache,
        "skip_tokenizer_init": settings.skip_tokenizer_init,
        "graph_batch_sizes": list(settings.graph_batch_sizes),
        "compile_max_batch": settings.compile_max_batch,
    }


def acceptance_of(engine: Engine) -> str:
    """`real`, or a description of synthetic acceptance; empty without speculation."""
    spec = engine.settings.spec
    if spec.simulated_accept_lens:
        return synthetic_acceptance(spec.simulated_accept_lens)
    return "real" if spec.width > 1 else ""
