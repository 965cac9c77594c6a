"""Flags of SGLang's and vLLM's servers that are not the engine's: what they ask for is always so, or cannot be had."""

import functools
import json
from dataclasses import dataclass
from importlib import resources


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
INSTEAD = {  # of flags that are too particular for the file
    "--seed": "use --random-seed",
    "--skip-server-warmup": "every path is warmed up before the server is ready; leave it out",
    "--sampling-backend": "each operation has one kernel, chosen for the device; leave it out",
}


def instead_of(flag: str) -> str | None:
    """Why a flag of another server is refused, and what to do; None if it is unknown."""
    return INSTEAD.get(flag) or _refused().get(flag)


@functools.cache
def _refused() -> dict[str, str]:
    """Read when a flag is met that is not the engine's: a start needs none of this."""
    text = resources.files("overlap_spec").joinpath("data/foreign_flags.json").read_text()
    return {flag: row["instead"] for row in json.loads(text) for flag in row["flags"].split()}


def reasons() -> dict[str, list[str]]:
    """Every reason, and the flags that it answers."""
    found: dict[str, list[str]] = {}
    for flag, why in sorted((_refused() | INSTEAD).items()):
        found.setdefault(why, []).append(flag)
    return found
