"""What isolation costs two clients with a common system prompt: tokens found in the cache, and tokens per second.

    python benchmarks/isolation_cost.py --output benchmarks/results/isolation_cost_cpu.json
    python benchmarks/isolation_cost.py --device cuda --letters 4096 --output FILE

Both ask about the same documents, which is the worst case: with isolation each is computed twice. All servers are up at
once and answer by turns, one request at a time, so that whatever else the machine does slows all of them. On a CPU the
model is a small random one, on a GPU the default one.
"""

import argparse
import random
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import _tests_path  # noqa: F401 - lets this import from tests/
import httpx
import torch
from support.command_line import Service
from support.prying import KEYS, key_flags, write_slow_model

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import cache_directory

LETTERS = "abcdefghijklmnopqrstuvwxyz "
ANSWER = 32  # tokens
CACHED, PROMPT = (re.compile(rf'"{name}":(\d+)') for name in ("cached_tokens", "prompt_tokens"))
WAYS = {  # name: flags, and whether there are keys of two names
    "no keys": ((), False),
    "two names, `--no-isolate-clients`": (("--no-isolate-clients",), True),
    "two names, `--shared-prefix`": (("--shared-prefix", "{prefix}"), True),
    "two names": ((), True),
}


class Asked(NamedTuple):
    """What one request took, and tokens of its prompt: of those that were cached, and all."""

    seconds: float
    cached: int
    prompt: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--letters", type=int, default=512, help="of the system prompt, and of each document")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    rng = random.Random(0)
    system, *documents = (text_of(rng, arguments.letters) for _ in range(2 + arguments.documents))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        services = started(Path(folder), system, stack, arguments.device)
        taken: dict[str, list[Asked]] = {way: [] for way in WAYS}
        for document in documents:  # the first finds servers that are cold
            for name in KEYS:
                for way, service in services.items():
                    taken[way].append(ask(service, name, system + document))
    figures = [figure(way, asked[len(KEYS) :]) for way, asked in taken.items()]
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    write_report(arguments.output, {"benchmark": "isolation_cost", "run": describe_run(device, 1), "figures": figures})


def text_of(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(length))


def started(folder: Path, system: str, stack: ExitStack, device: str) -> dict[str, Service]:
    """A server of each way."""
    (folder / "prefix").write_text(system)
    (folder / "model").mkdir()
    fixed = ["--device", device, "--max-total-tokens", "60000"]
    if device == "cpu":
        fixed += ["--dtype", "float32", "--model", str(write_slow_model(folder / "model", 2048))]
    cache = {} if device == "cpu" else {"OVERLAP_SPEC_CACHE": cache_directory()}
    services = {}
    for index, (way, (flags, has_keys)) in enumerate(WAYS.items()):
        own = folder / str(index)
        own.mkdir()
        given = [flag.format(prefix=folder / "prefix") for flag in flags] + (key_flags(own) if has_keys else [])
        services[way] = stack.enter_context(Service(own, *fixed, *given, **cache))
    return services


def ask(service: Service, name: str, prompt: str) -> Asked:
    """Send one request."""
    sampling = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    headers, begun = {"authorization": f"Bearer {KEYS[name]}"}, time.perf_counter()
    body = {"text": prompt, "sampling_params": sampling}
    reply = httpx.post(f"{service.url}/generate", json=body, headers=headers, timeout=120).raise_for_status()
    taken = time.perf_counter() - begun
    cached, total = CACHED.search(reply.text), PROMPT.search(reply.text)
    assert cached and total, reply.text
    return Asked(taken, int(cached[1]), int(total[1]))


def figure(way: str, asked: list[Asked]) -> dict[str, Any]:
    """`cached`: share of the prompts' tokens; `tokens_per_second`: of answers, by the mean over requests."""
    cached = sum(each.cached for each in asked) / sum(each.prompt for each in asked)
    seconds = statistics.fmean(each.seconds for each in asked)
    return {"clients": way, "cached": round(cached, 3), "tokens_per_second": round(ANSWER / seconds, 1)}


if __name__ == "__main__":
    main()
