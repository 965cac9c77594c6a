"""What a draft learns while it serves, when traffic moves to another kind of text: records in JSON.

    python benchmarks/adapt_draft.py --output FILE.json --seeds 0 1 2 --parts beside hits    (four minutes for a seed)
    python benchmarks/adapt_draft.py --output FILE.json --seeds 0 1 2 --parts head trained   (eight minutes)
    python benchmarks/adapt_draft.py --output FILE.json --seconds 60 --train 60s             (200 s)

Servers get the same chats and then the same requests for records, as many at a time, in equal turns: one without the
flag, and after it one with the flag, with pauses; and one with a head that `train-draft` has trained on such requests
alone, beginning with the one that is served. So there are three accept lengths, with the flag of the last records:

    gained = (with the flag - without) / (with the trained head - without)

`hits`: a server answers long prompts and then gets the head that `beside` has learnt last, or else the trained one. The
same prompts again begin in the cache with what the older head has left of them. Then the cache is emptied: all of
them are computed anew, and once more they are hits, of the head that serves.

FILE is written after each part, and a part that is there is not run again; each names its commit. The trained head is
trained again if its folder beside FILE is gone. What follows `--` goes to every server. `--join` puts files together
that several processes have written, each on its own GPU; of a part that is run anew, the file that has it stands first.
"""

import argparse
import gzip
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import _tests_path  # noqa: F401 - lets this import from tests/
import httpx
import torch
from support.command_line import Service

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import cache_directory
from overlap_spec.hub import smollm2

FIELDS = [
    "name",
    "age",
    "city",
    "email",
    "job",
    "salary",
    "street",
    "zip",
    "phone",
    "company",
    "country",
    "id",
    "tags",
    "active",
    "score",
]
NAMES = [
    "Ada",
    "Bo",
    "Cem",
    "Dana",
    "Eli",
    "Fay",
    "Gus",
    "Hana",
    "Ivo",
    "Jun",
    "Kai",
    "Lea",
    "Max",
    "Nia",
    "Ola",
    "Pia",
]
CHATS = Path(smollm2.__file__).parents[1] / "data/prompts/train10k.jsonl.gz"
TRAINED = 4000  # requests that the trained head learns from; those of traffic have other numbers
NUMBERS = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
]
EXAMPLES = 12  # in each prompt of `hits`
KEY = {"Authorization": "Bearer of-this-benchmark"}  # servers without keys take any
WINDOW_S = 5.0
LAST = 0.25  # of the time of records: what came last
SAMPLE = re.compile(r"overlap_spec:(\w+)(?:\{[^}]*\})? ([-+.0-9e]+)$", re.MULTILINE)


def record_request(number: int, seed: int, examples: int = 1) -> str:
    """Ask for records with some fields."""
    rng = random.Random(f"{seed}/{number}")
    fields = rng.sample(FIELDS, 6)
    values = ([rng.choice(NAMES) if each == "name" else rng.randrange(100) for each in fields] for _ in range(examples))
    example, wanted = json.dumps([dict(zip(fields, each, strict=True)) for each in values]), ", ".join(fields)
    return f"Write a JSON list of eight records with the fields {wanted}. Example: {example}. Answer with JSON alone."


class Traffic:
    """So many requests at a time, in a fixed order; half of them greedy."""

    def __init__(self, service: Service, seed: int, at_once: int) -> None:
        self._url, self._seed = service.url, seed
        self._clients = [httpx.Client(timeout=120) for _ in range(at_once)]  # none is made in a turn's time
        lines = gzip.decompress(CHATS.read_bytes()).splitlines()[: 1000 * (seed + 1)]
        self._chats = [json.loads(line)["messages"] for line in lines[1000 * seed :]]
        self._tokens: dict[bool, list[tuple[float, int]]] = {False: [], True: []}  # of records or not: seconds, tokens
        self._numbers = {False: count(), True: count()}  # of requests: no turn repeats those of another

    def run(self, seconds: float, records: bool) -> list[dict[str, Any]]:
        """Send and wait; figures of each window."""
        numbers, until, windows = self._numbers[records], time.monotonic() + seconds, list[dict[str, Any]]()
        got: list[int] = []
        threads = [
            threading.Thread(target=self._send, args=(client, numbers, until, records, got)) for client in self._clients
        ]
        before, begun = self.metrics(), time.monotonic()
        first = begun
        for thread in threads:
            thread.start()
        while (left := until - time.monotonic()) > 0.5:
            time.sleep(min(WINDOW_S, left))
            now, at = self.metrics(), time.monotonic()
            windows.append(window(before, now, at - begun))
            before, begun = now, at
        for thread in threads:
            thread.join()
        self._tokens[records].append((time.monotonic() - first, sum(got)))
        return windows

    def tokens_per_second(self) -> float:
        """Of records, as clients have got them; metrics lag behind."""
        taken = self._tokens[True]
        return sum(tokens for _, tokens in taken) / sum(seconds for seconds, _ in taken)

    def metrics(self) -> dict[str, float]:
        return metrics(self._url)

    def _send(self, client: httpx.Client, numbers: "count[int]", until: float, records: bool, got: list[int]) -> None:
        while time.monotonic() < until:
            number = next(numbers)
            record = [{"role": "user", "content": record_request(number, self._seed)}]
            messages = record if records else self._chats[number % len(self._chats)]
            got.append(completion(client, self._url, messages, number, 0.0 if number % 2 else 0.7))


def completion(client: httpx.Client, url: str, messages: list[Any], seed: int, temperature: float) -> int:
    """Tokens of one answer."""
    body = {"messages": messages, "max_tokens": 160, "seed": seed, "temperature": temperature}
    reply = client.post(f"{url}/v1/chat/completions", json=body, headers=KEY).raise_for_status()
    return int(reply.json()["usage"]["completion_tokens"])


def metrics(url: str) -> dict[str, float]:
    found = httpx.get(f"{url}/metrics", timeout=60, headers=KEY).text
    return {name: float(value) for name, value in SAMPLE.findall(found)}


def window(before: dict[str, float], now: dict[str, float], seconds: float) -> dict[str, Any]:
    """`accept_length` without prefills' tokens, bonus included; what learning took, in shares of the time."""
    tokens, steps, spent = (
        now.get(name, 0.0) - before.get(name, 0.0)
        for name in ("generation_tokens_total", "spec_verify_calls_total", "adapt_seconds_total")
    )
    requests = now.get("num_requests_total", 0.0) - before.get("num_requests_total", 0.0)
    learnt = {name: round(now[f"adapt_{name}_total"]) for name in ("train_steps", "versions", "dropped", "refused")
              if f"adapt_{name}_total" in now}  # fmt: skip
    return {
        "seconds": round(seconds, 2),
        "accept_length": round((tokens - requests) / max(steps, 1), 4),
        "learning": round(spent / seconds, 4),
        **learnt,
    }


def mean(windows: list[dict[str, Any]], key: str, share: float = 1.0) -> float:
    """Of the last windows, by their seconds."""
    last = windows[-max(round(share * len(windows)), 1) :]
    return sum(each[key] * each["seconds"] for each in last) / sum(each["seconds"] for each in last)


def started(stack: ExitStack, name: str, given: argparse.Namespace, head: str, *flags: str) -> Service:
    """A server with a head, in a folder of its own."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=name)))
    fixed = ["--device", given.device, "--audit-rate", str(given.audit_rate), *NUMBERS]
    fixed += ["--max-total-tokens", "65536"]  # servers share a device: none takes what it has left
    fixed += ["--speculative-draft-model-path", head, *flags, *given.flags]
    service = Service(folder, *fixed, OVERLAP_SPEC_CACHE=cache_directory())
    stack.callback(service.process.kill)  # also if another one does not start
    return service


def beside(seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Servers without the flag and with it: chats, and then records, the same ones.

    The one that learns would do so in the other's time, if that had its turn later.
    """
    kept = str(Path(given.output).with_suffix(".learnt").resolve())
    flags = {"without": (), "learns": ("--adapt-draft", "--adapt-save", kept)}
    with ExitStack() as stack:
        head = str(smollm2.DRAFT)
        services = {name: started(stack, name, given, head, *each) for name, each in flags.items()}  # load at once
        traffic = {name: Traffic(stack.enter_context(each), seed, given.at_once) for name, each in services.items()}
        turns, found = max(round(given.seconds / given.turn), 1), dict[str, Any]()
        for name, each in traffic.items():
            chats, windows = each.run(given.chats, False), list[dict[str, Any]]()
            for _ in range(turns if name == "learns" else -(-turns // 3)):
                time.sleep(given.rest if name == "learns" else 0.0)
                windows += each.run(given.turn, True)
            found[name] = told(services[name], each, chats, windows)
            print(f"beside/{seed}", name, json.dumps(found[name]), flush=True)  # a part may be cut off
        return found


def alone(head: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """A server without the flag."""
    with ExitStack() as stack:
        service = stack.enter_context(started(stack, "alone", given, head))
        traffic = Traffic(service, seed, given.at_once)
        chats, records = traffic.run(given.chats, False), traffic.run(given.turn, True)
        return told(service, traffic, chats, records)


def hits(head: str, given: argparse.Namespace) -> dict[str, Any]:
    """Accept lengths of the same prompts: with the head that is served, and with another one that takes over."""
    with ExitStack() as stack:
        flags = "--admin-api-key", KEY["Authorization"].split()[1]
        url = stack.enter_context(started(stack, "hits", given, str(smollm2.DRAFT), *flags)).url

        def answered() -> dict[str, float]:
            before, numbers = metrics(url), iter(range(given.hit_prompts))

            def user() -> None:
                with httpx.Client(timeout=120) as client:
                    for number in numbers:
                        text = record_request(number, -2, EXAMPLES)
                        completion(client, url, [{"role": "user", "content": text}], number, 0.0)

            users = [threading.Thread(target=user) for _ in range(given.at_once)]
            for each in users:
                each.start()
            for each in users:
                each.join()
            time.sleep(2.0)  # for metrics
            now = metrics(url)
            cached = now["cached_tokens_total"] - before["cached_tokens_total"]
            share = cached / (now["prompt_tokens_total"] - before["prompt_tokens_total"])
            return {"accept_length": window(before, now, 1.0)["accept_length"], "cached": round(share, 3)}

        found = {"older head, computed": answered(), "older head, hits": answered()}
        body = {"model_path": str(Path(head).resolve())}
        httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=120, headers=KEY).raise_for_status()
        found["newer head, hits of the older one"] = answered()
        httpx.post(f"{url}/flush_cache", timeout=60, headers=KEY).raise_for_status()
        found |= {"newer head, computed": answered(), "newer head, hits": answered()}
        return found | {"head": Path(head).name}


def newest_head(path: Path) -> Path:
    """The head that a server has learnt last; without one, that of `train-draft`."""
    learnt = path.with_suffix(".learnt")
    return learnt if (learnt / "config.json").is_file() else path.with_suffix(".head")


def told(
    service: Service, traffic: Traffic, chats: list[dict[str, Any]], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Figures of a server."""
    time.sleep(2.0)  # for audits that wait
    report = service.get("/audit").json()
    audit = report["figures"]
    return {
        "chats": round(mean(chats, "accept_length"), 4),
        "records": round(mean(records, "accept_length"), 4),
        "records_last": round(mean(records, "accept_length", LAST), 4),
        "tokens_per_second": round(traffic.tokens_per_second(), 1),
        "learning": round(mean(records, "learning"), 4),
        "audited_tokens": audit["tokens"],
        "faults": audit["faults"],
        "windows": [{"accept_length": each["accept_length"]} for each in records[:-1]] + records[-1:],
        **({"audit": with_records(report)} if audit["faults"] else {}),
    }


def with_records(audit: dict[str, Any]) -> dict[str, Any]:
    """A server's audit with all that runs requests with a fault again, and the differences nearest to the bound."""
    path, most = audit["fault_file"], 1e30  # the margin of a forbidden token
    recent = sorted(audit["recent"], key=lambda each: each["margin"] or most, reverse=True)
    lines = Path(path).read_text().splitlines() if path else []  # it could not be written
    return audit | {"recent": recent[:20], "records": [json.loads(line) for line in lines]}


def trained_head(given: argparse.Namespace) -> dict[str, Any]:
    """Let `train-draft` go on with the head that is served, on records alone."""
    prompts, head = Path(given.output).with_suffix(".jsonl"), Path(given.output).with_suffix(".head")
    texts = (record_request(number, -1) for number in range(TRAINED))
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    prompts.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "overlap_spec", "train-draft", "--model-path", "smollm2", "--method", "EAGLE3"]
    command += ["--speculative-draft-model-path", str(smollm2.DRAFT), "--prompts", str(prompts)]
    command += ["--output", str(head), "--time-limit", given.train, "--device", given.device]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    print(told.stderr[-3000:], flush=True)
    if told.returncode:
        raise SystemExit(f"train-draft: status {told.returncode}")
    return {"head": head.name, "time": given.train, "said": told.stderr.strip().splitlines()[-1]}


def summary(parts: dict[str, Any], seed: int) -> dict[str, Any]:
    """`gained`: of the distance to the trained head; `throughput`: with the flag over without, all the time.

    Without a run of the trained head on this seed's requests, that of the first seed counts: `trained_on`.
    """
    both = parts[f"beside/{seed}"]
    without, learns = both["without"], both["learns"]
    on = seed if f"trained/{seed}" in parts else 0
    trained = parts.get(f"trained/{on}", {"records": 0.0, "faults": 0})
    distance = trained["records"] - without["records"]
    gained = learns["records_last"] - without["records"]
    return {
        "seed": seed,
        "without": without["records"],
        "learns_last": learns["records_last"],
        "trained": trained["records"],
        "trained_on": on,
        "gained": round(gained / distance, 3) if distance > 0 else None,
        "throughput": round(learns["tokens_per_second"] / without["tokens_per_second"], 3),
        "faults": without["faults"] + learns["faults"] + trained["faults"],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True, metavar="FILE.json")
    parser.add_argument("--parts", nargs="+", default=["head", "trained", "beside", "hits"], help="which are run")
    parser.add_argument("--join", nargs="+", default=[], metavar="FILE.json", help="put their parts into --output")
    parser.add_argument("--seconds", type=float, default=75, help="of records, with the flag; a third without it")
    parser.add_argument("--chats", type=float, default=4, help="seconds of chats before")
    parser.add_argument("--turn", type=float, default=15, help="seconds of a turn of them")
    parser.add_argument("--rest", type=float, default=5, help="seconds between turns with the flag")
    parser.add_argument("--train", default="60s", help="time of train-draft")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of requests, each run for itself")
    parser.add_argument("--hit-prompts", type=int, default=192)
    parser.add_argument("--at-once", type=int, default=8, help="requests")
    parser.add_argument("--audit-rate", type=float, default=0.05)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("flags", nargs="*", help="of every server, behind --")
    return parser.parse_args()


def joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of several runs, each with its commit; of a part that several have, the first."""
    parts: dict[str, Any] = {}
    for report in reports:
        for name, part in report["parts"].items():
            parts.setdefault(name, {"commit": report["run"]["commit"]} | part)
    return {**reports[0], "summary": summaries(parts), "parts": parts}


def summaries(parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [summary(parts, seed) for seed in sorted(int(name[7:]) for name in parts if name.startswith("beside/"))]


def main() -> None:
    given = arguments()
    path = Path(given.output)
    if given.join:
        write_report(str(path), joined([json.loads(Path(each).read_text()) for each in given.join]))
        return
    report: dict[str, Any] = joined([json.loads(path.read_text())]) if path.is_file() else {"parts": {}}
    parts, device = report["parts"], "cpu" if given.device == "cpu" else torch.cuda.get_device_name()
    head, run = path.with_suffix(".head"), describe_run(device, 1)
    work: dict[str, Callable[[], dict[str, Any]]] = {}
    for seed in given.seeds:
        work[f"trained/{seed}"] = partial(alone, str(head), seed, given)
        work[f"beside/{seed}"] = partial(beside, seed, given)
    work["hits"] = lambda: hits(str(newest_head(path)), given)
    work = {name: part for name, part in work.items() if name not in parts and name.partition("/")[0] in given.parts}
    if "head" in given.parts and not head.is_dir() and not all(name.startswith("beside") for name in work):
        work = {"head": lambda: trained_head(given)} | work
    for name, part in work.items():
        begun = time.monotonic()
        parts[name] = {"commit": run["commit"]} | part()
        print(name, f"{time.monotonic() - begun:.0f} s", json.dumps(parts[name]), flush=True)
        kept = {key: value for key, value in vars(given).items() if key not in ("output", "join")}
        report = {"benchmark": "adapt_draft", "run": run, "arguments": kept}
        report |= {"summary": summaries(parts), "parts": parts}
        write_report(str(path), report)
    print(json.dumps(report.get("summary"), indent=1))


if __name__ == "__main__":
    main()
