"""Flags of SGLang's and vLLM's servers that are not the engine's: what they ask for is always so, or cannot be had."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Granted:
    """A flag whose effect is always there. `values`: the only ones it may have; none: it takes no value."""

    note: str
    values: tuple[str, ...] = ()


GRANTED = {
    "--enable-metrics": Granted("figures are always at /metrics"),
    "--enable-cache-report": Granted("usage always counts cached tokens"),
    "--enable-prompt-tokens-details": Granted("usage always counts cached tokens"),
    "--enable-prefix-caching": Granted("the prefix cache is on unless --disable-radix-cache is given"),
    "--enable-chunked-prefill": Granted("long prompts are always computed in chunks"),
    "--async-scheduling": Granted("steps overlap unless --disable-overlap-schedule is given"),
    "--sleep-on-idle": Granted("an idle engine always sleeps"),
    "--enable-auto-tool-choice": Granted("tool calls are read unless --tool-call-parser none is given"),
    "--enable-request-id-headers": Granted("answers always have x-request-id"),
    "--tokenizer-mode": Granted("there is one tokenizer", ("auto", "hf")),
    "--scheduling-policy": Granted("clients take turns, each one's requests in the order of arrival", ("fcfs",)),
    "--grammar-backend": Granted("grammars are llguidance's", ("llguidance", "guidance", "auto")),
    "--generation-config": Granted("the model's, unless --sampling-defaults openai is given", ("auto",)),
}


def instead_of(flag: str) -> str | None:
    """Why a flag of another server is refused, and what to do; None if it is unknown."""
    return _refused().get(flag)


def reasons() -> dict[str, list[str]]:
    """Every reason, and the flags that it answers."""
    found: dict[str, list[str]] = {}
    for flag, why in sorted(_refused().items()):
        found.setdefault(why, []).append(flag)
    return found


@functools.cache
def _refused() -> dict[str, str]:
    """Flag -> why. It is read when a flag is met that is not the engine's: a start needs none of this."""
    text = resources.files("overlap_spec").joinpath("data/foreign_flags.json").read_text()
    return {flag: why for row in json.loads(text) for why, flags in _answers(row) for flag in flags.split()}


def _answers(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """One answer to all flags of a row; or, where it has flags by what to use instead, one for each of those."""
    instead, flags = row["instead"], row["flags"]
    if isinstance(flags, str):
        yield instead, flags
    else:
        yield from ((instead.format(own), others) for own, others in flags.items())
