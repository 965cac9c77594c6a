"""What isolation costs two clients with a common system prompt: tokens found in the cache, and tokens per second.

    python benchmarks/isolation_cost.py --output benchmarks/results/isolation_cost_cpu.json

Both ask about the same documents, which is the worst case: with isolation each is computed twice. All servers are up at
once and answer by turns, one request at a time, so that whatever else the machine does slows all of them. The model is
a small random one.
"""

import argparse
import random
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _tests_path  # noqa: F401 - lets this import from tests/
import httpx
from support.command_line import Service
from support.prying import KEYS, key_flags, write_slow_model

from overlap_spec.bench.report import describe_run, write_report

LETTERS = "abcdefghijklmnopqrstuvwxyz "
SYSTEM, DOCUMENT, ANSWER = 512, 512, 32  # tokens; letters are tokens here
CACHED = re.compile(r'"cached_tokens":(\d+)')
WAYS = {  # name: flags, and whether there are keys of two names
    "no keys": ((), False),
    "two names, `--no-isolate-clients`": (("--no-isolate-clients",), True),
    "two names, `--shared-prefix`": (("--shared-prefix", "{prefix}"), True),
    "two names": ((), True),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--documents", type=int, default=24)
    arguments = parser.parse_args()
    rng = random.Random(0)
    system = text_of(rng, SYSTEM)
    documents = [text_of(rng, DOCUMENT) for _ in range(arguments.documents)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        services = started(Path(folder), system, stack)
        taken: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
        for document in [text_of(rng, DOCUMENT), *documents]:  # the first finds servers that are cold
            for name in KEYS:
                for way, service in services.items():
                    taken[way].append(ask(service, name, system + document))
    figures = [figure(way, asked[len(KEYS) :]) for way, asked in taken.items()]
    write_report(arguments.output, {"benchmark": "isolation_cost", "run": describe_run("cpu", 1), "figures": figures})


def text_of(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(length))


def started(folder: Path, system: str, stack: ExitStack) -> dict[str, Service]:
    """A server of each way."""
    (folder / "prefix").write_text(system)
    (folder / "model").mkdir()
    model = write_slow_model(folder / "model", 2048)
    services = {}
    for index, (way, (flags, has_keys)) in enumerate(WAYS.items()):
        own = folder / str(index)
        own.mkdir()
        given = [flag.format(prefix=folder / "prefix") for flag in flags] + (key_flags(own) if has_keys else [])
        fixed = "--model", str(model), "--dtype", "float32", "--max-total-tokens", "60000"
        services[way] = stack.enter_context(Service(own, *fixed, *given))
    return services


def ask(service: Service, name: str, prompt: str) -> tuple[float, int]:
    """Seconds, and tokens of the prompt that were cached."""
    sampling = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    headers, begun = {"authorization": f"Bearer {KEYS[name]}"}, time.perf_counter()
    body = {"text": prompt, "sampling_params": sampling}
    reply = httpx.post(f"{service.url}/generate", json=body, headers=headers, timeout=120).raise_for_status()
    found = CACHED.search(reply.text)
    assert found, reply.text
    return time.perf_counter() - begun, int(found[1])


def figure(way: str, asked: list[tuple[float, int]]) -> dict[str, Any]:
    """`cached`: share of the prompts' tokens; `tokens_per_second`: of answers, by the mean over requests."""
    cached = statistics.fmean(count for _, count in asked) / (SYSTEM + DOCUMENT)
    seconds = statistics.fmean(taken for taken, _ in asked)
    return {"clients": way, "cached": round(cached, 3), "tokens_per_second": round(ANSWER / seconds, 1)}


if __name__ == "__main__":
    main()
