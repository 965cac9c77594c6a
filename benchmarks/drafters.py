"""Times a decode step with each drafter on one target, chains and trees, at the shape of Llama-3.1-8B.

    python benchmarks/drafters.py --output benchmarks/results/drafters_h200.json      five minutes at first
    python benchmarks/drafters.py --defaults --output FILE                            two and a half minutes
    python benchmarks/drafters.py --tiny                                              on a CPU, to see that it runs
    python benchmarks/drafters.py --train 8m --kinds DFLASH --prompts FILE.jsonl --keep DIR --output FILE  ten minutes
    python benchmarks/drafters.py --join FILE FILE --output FILE                      rows of several runs

Weights are random: the drafts have the layers of the published ones, and acceptance is synthetic, 2.5 tokens a step.
The target is loaded once. A step of greedy requests, its draft included, is one CUDA graph, and several are queued:
this is the device's time, which no host holds up. The median of the rounds counts. A drafter takes ten seconds, and
twice that where its kernels are not compiled yet. FILE is written after each; with the same code, the next run leaves
out what is in it.

With `--defaults` each drafter serves with default numbers, in turns with plain decoding: tok/s of whole calls.

With `--train` the drafters are made: `train-draft` makes one of each kind for SmolLM2, with the same prompts and in the
same time, and each answers chat20 and copy20 with each of its windows. Accept lengths are real then. The engines of a
kind start at once; when all are ready they answer in turns, one prompt at a time, and the median of the rounds counts.
FILE is written after each turn: what ends the run early costs rounds. DIR keeps the drafts, and what is in it is
measured without being trained again.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import _tests_path
import msgspec
import torch
from deterministic_price import measured_before
from grid.calls import Load
from grid.cases import Case, accepting
from grid.report import PLAIN, Run
from never_slower import Together
from support.plans import SlotPart, plan_of

from overlap_spec.bench.latency import measure_latency
from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.bench.runs import WARM_UP_CHAT
from overlap_spec.bench.workload import GREEDY as GREEDY_CHATS, load_prompts
from overlap_spec.client import Client
from overlap_spec.config import EngineConfig, Machine, Settings
from overlap_spec.config.resolve import resolve, without_speculation
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config
from overlap_spec.features.ngram.worker import fuse
from overlap_spec.hub import resolve_drafting, resolve_model
from overlap_spec.messages import ResetSlot, SamplingParams
from overlap_spec.sampling.context import GREEDY_WORK
from overlap_spec.speculative.methods import method_of
from overlap_spec.worker.build import build_executor, load_models, prepare_place
from overlap_spec.worker.capture import CudaRecorder
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry, LoadedModels, settle_geometry
from overlap_spec.worker.startup.warmup import graph_sizes
from overlap_spec.worker.step import StepShape

SHAPE = json.loads((_tests_path.ROOT / "benchmarks/shapes/llama-3.1-8b/config.json").read_text())
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "eos_token_id": 2}
BATCHES, CONTEXT, STEPS, ROUNDS = (1, 8, 32), 256, 24, 5
COMMITTED = 2.5
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
OF_DRAFTS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
OF_DRAFTS += ("rms_norm_eps", "rope_theta", "hidden_act")


class Row(NamedTuple):
    """A drafter, with its steps, topk and draft tokens."""

    name: str
    method: str
    draft: str
    numbers: tuple[int, int, int]
    copied: int | None = None  # guesses of n-grams beside the chain


ROWS = (
    Row("EAGLE-3 chain", "EAGLE3", "eagle3", (3, 1, 4)),
    Row("EAGLE-3 chain", "EAGLE3", "eagle3", (7, 1, 8)),
    Row("EAGLE-3 tree", "EAGLE3", "eagle3", (7, 4, 16)),
    Row("EAGLE-3 chain and 8 of n-grams", "EAGLE3", "eagle3", (3, 1, 4), 8),
    Row("P-EAGLE chain", "EAGLE3", "peagle", (7, 1, 8)),
    Row("P-EAGLE tree", "EAGLE3", "peagle", (7, 4, 16)),
    Row("DFlash chain", "DFLASH", "dflash", (7, 1, 8)),
    Row("DFlash tree", "DFLASH", "dflash", (7, 4, 16)),
    Row("DSpark chain", "DSPARK", "dspark", (7, 1, 8)),
)


class Window(NamedTuple):
    """How a trained draft is used: its numbers, and guesses of n-grams beside them. n-grams alone have no draft."""

    method: str
    numbers: tuple[int, int, int]
    copied: int | None = None

    def flags(self, draft: Path) -> dict[str, Any]:
        steps, topk, tokens = self.numbers
        given = {"speculative_algorithm": self.method, "speculative_num_draft_tokens": tokens}
        if self.method == "NGRAM":
            return given
        given |= {"speculative_num_steps": steps, "speculative_eagle_topk": topk}
        return given | {"speculative_draft_model_path": str(draft), "speculative_fuse_ngram": self.copied}


CHAINS, TREE = ((3, 1, 4), (5, 1, 6), (7, 1, 8)), (7, 4, 16)
WINDOWS = {
    "EAGLE3": (
        *(Window("EAGLE3", numbers) for numbers in (*CHAINS, TREE)),
        *(Window("EAGLE3", (3, 1, 4), 8), Window("NGRAM", (11, 10, 12))),
    ),
    "DFLASH": tuple(Window("DFLASH", numbers) for numbers in (*CHAINS, TREE)),
    "DSPARK": tuple(Window("DSPARK", numbers) for numbers in CHAINS),
}
SETS, TURNS = ("chat20", "copy20"), 3
FEW = {"max_running_requests": 4, "max_total_tokens": 16384, "audit_rate": 0.0, "log_level": "warning"}  # for one user
DRAFTS = {"dflash": "DFLASH", "dspark": "DSPARK", "peagle": "EAGLE3", "eagle3": "EAGLE3"}  # of `write_shapes`
ANSWER, START_S = 256, 40.0
LAST_LINE = re.compile(r"([\d,]+) steps")

Runs = dict[tuple[Window, str], list[dict[str, Any]]]


def trained(kind: str, directory: Path, given: argparse.Namespace, flags: list[str]) -> dict[str, Any] | None:
    """What `train-draft` has made, and how; None if it fails. What the folder has already is not trained again."""
    kept, prompts = directory / f"{kind}.json", Path(given.prompts)
    asked = {"time_limit": given.train, "prompts_sha256": hashlib.sha256(prompts.read_bytes()).hexdigest()}
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        if asked.items() <= found.items():
            return found
        raise SystemExit(f"{kept}: {kind} was trained with other prompts or in another time")
    order = ["--method", kind, "--prompts", str(prompts), "--output", str(directory / kind)]
    said = called("train-draft", *order, "--time-limit", given.train, *flags)
    if said is None:
        return None
    steps = LAST_LINE.findall(said)
    found = asked | {"training_steps": int(steps[-1].replace(",", "")) if steps else 0}
    found["trained_at"] = describe_run("", 1)["commit"]
    kept.write_text(json.dumps(found))
    return found


async def answered(windows: Sequence[Window], draft: Path, base: EngineConfig, num_tokens: int) -> AsyncIterator[Runs]:
    """All runs so far, after each: plain decoding's and those of windows, in turns on engines that are all ready."""
    plain = Window("plain", (0, 1, 1))
    configs = {plain: without_speculation(base)}
    configs |= {window: msgspec.structs.replace(base, **window.flags(draft)) for window in windows}
    texts = {name: [[{"role": "user", "content": text}] for text in load_prompts(name)] for name in SETS}
    runs: Runs = {}
    async with AsyncExitStack() as stack:
        started = await asyncio.gather(*(stack.enter_async_context(Engine(config)) for config in configs.values()))
        for _ in range(TURNS):
            for name, prompts in texts.items():
                for window, engine in zip(configs, started, strict=True):
                    sampling, warm_up = GREEDY_CHATS.params(num_tokens), [{"role": "user", "content": WARM_UP_CHAT}]
                    figures = await measure_latency(engine.client, prompts, sampling, warm_up)
                    runs.setdefault((window, name), []).append(figures)
                    yield runs


def rows_of(runs: Runs, about: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each window and set of prompts: medians over turns. Accept lengths are those of the first turn."""
    speeds = {key: round(statistics.median(run["tokens_per_second"] for run in of), 1) for key, of in runs.items()}
    plain = {prompts: speed for (window, prompts), speed in speeds.items() if window.method == "plain"}
    rows = []
    for (window, prompts), found in runs.items():
        row = {"drafter": window.method, "numbers": list(window.numbers), "prompts": prompts}
        row |= {} if window.copied is None else {"copied": window.copied}
        shares = found[0]["accepted_by_position"]
        reached = max((at for at, share in enumerate(shares, 1) if share), default=0)
        row |= {"accept_length": found[0]["accept_length"], "accepted_by_position": shares[:reached]}
        row["step_ms"] = round(statistics.median(run["step_ms"] for run in found), 4)
        row |= {"tokens_per_second": speeds[window, prompts], "turns": len(found)}
        rows.append(row | {"over_plain": round(speeds[window, prompts] / plain[prompts], 3), **about})
    return rows


async def measure_trained(
    given: argparse.Namespace, directory: Path, flags: list[str], report: dict[str, Any], write: Callable[[], None]
) -> None:
    """Adds the rows of each kind that is not in the report. What fails is said, and left out."""
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    base = engine_config(parser.parse_known_args(flags)[0], **FEW)  # others are of train-draft alone
    base = msgspec.structs.replace(base, mem_fraction_static=None)  # what engines beside it take counts as taken
    before = report["rows"]
    for kind in given.kinds:
        if any(row["kind"] == kind for row in before):
            continue
        if (how := trained(kind, directory, given, flags)) is None:
            continue
        about = {"kind": kind, "training_steps": how["training_steps"], "trained_at": how["trained_at"]}
        about["commit"] = report["run"]["commit"]
        async for runs in answered(WINDOWS[kind], directory / kind, base, given.num_tokens):
            report["rows"] = before + rows_of(runs, about)
            write()
        before = report["rows"]
        print(*before, sep="\n", flush=True)


async def measure_defaults(directory: Path, batches: tuple[int, ...], run: Run) -> None:
    """Adds a row for each drafter and batch: its default numbers over plain decoding, as `never_slower.py` measures."""
    shape = {"model_path": str(directory / "target"), "load_format": "dummy", **accepting(COMMITTED)}
    plain: dict[str, Client] = {}
    async with AsyncExitStack() as stack:
        for name, method in DRAFTS.items():
            flags = shape | {"speculative_algorithm": method, "speculative_draft_model_path": str(directory / name)}
            case = Case(flags, batches=batches, lengths=(ANSWER,))
            if all(run.rounds_of(name, "cell", batch, ANSWER) >= run.rounds for batch in batches):
                continue
            if not run.has_time(START_S):
                print(f"no time for {name}", flush=True)
                return
            drafting = Together({name: case}, run)
            if not plain:
                await drafting.start(stack, PLAIN)
            plain = plain or dict(drafting.clients)
            drafting.clients |= plain
            async with AsyncExitStack() as own:
                await drafting.start(own, name)
                for batch in batches:
                    for turn in range(run.rounds):
                        await drafting.round("cell", Load(batch, ANSWER), [name], turn)


def joined(files: Sequence[str]) -> dict[str, Any]:
    """The rows of several runs, which all had the same prompts and time. Each names its commit."""
    reports = [json.loads(Path(file).read_text()) for file in files]
    if len({(each["run"]["device"], each["time_limit"], each["prompts_sha256"]) for each in reports}) > 1:
        raise SystemExit("these runs had different devices, times or prompts")
    return {**reports[0], "rows": [row for each in reports for row in each["rows"]]}


def called(*words: str) -> str | None:
    """What `overlap-spec` says; None if it fails, whose last lines are printed."""
    run = subprocess.run([sys.executable, "-m", "overlap_spec", *words], capture_output=True, text=True, check=False)
    said = run.stdout + run.stderr
    if run.returncode:
        print(" ".join(words[:4]), "failed:", *said.splitlines()[-3:], sep="\n", flush=True)
        return None
    return said


def write_shapes(directory: Path, tiny: bool) -> None:
    """The config.json of the target and of each draft; weights are drawn."""
    target = SHAPE | (TINY if tiny else {})
    vocabulary, layers = target["vocab_size"], target["num_hidden_layers"]
    like = {key: target[key] for key in OF_DRAFTS} | {"max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    head = like | {"model_type": "llama", "draft_vocab_size": min(32000, vocabulary // 2), "tie_word_embeddings": False}
    aux = sorted({1, layers // 2 - 1, layers - 4})
    head |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": aux, "use_aux_hidden_state": True}}
    spread = [1 + round(index * (layers - 4) / 4) for index in range(5)]
    block = like | {"model_type": "qwen3", "num_hidden_layers": 5, "num_target_layers": layers}
    block |= {"target_layer_ids": spread, "mask_token_id": vocabulary - 1}
    of_markov = {"markov_head_type": "vanilla", "markov_rank": 256, "enable_confidence_head": True}
    configs = {
        "target": target,
        "eagle3": head | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1},
        "peagle": head | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4, "pard_token": vocabulary - 1},
        "dflash": block | {"architectures": ["DFlashDraftModel"], "dflash_config": block, "block_size": 16},
        "dspark": block | of_markov | {"architectures": ["Qwen3DSparkModel"], "block_size": 7},
    }
    for name, config in configs.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))


def settings_of(directory: Path, row: Row, device: str) -> Settings:
    """As flags say it."""
    steps, topk, tokens = row.numbers
    config = EngineConfig(
        model_path=str(directory / "target"),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        max_running_requests=max(BATCHES),
        max_total_tokens=max(BATCHES) * 2048,
        context_length=2048,
        speculative_algorithm=row.method,
        speculative_draft_model_path=str(directory / row.draft),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
        speculative_fuse_ngram=row.copied,
        speculative_simulate_acc_len=(COMMITTED,),
    )
    files = resolve_model(config)
    settings, _ = resolve(config, files, Machine(16, device == "cuda"))
    spec, _ = resolve_drafting(settings.spec, files, config)
    return msgspec.structs.replace(settings, spec=spec)


def executors(directory: Path, rows: tuple[Row, ...], device: str) -> Iterator[tuple[Row, Executor, Geometry]]:
    """Each drafter with the target, which all of them share."""
    models: LoadedModels | None = None
    for row in rows:
        settings = settings_of(directory, row, device)
        place = prepare_place(settings)
        if models is None:
            models = load_models(settings, place, lambda done, total: None)
        else:
            method = method_of(settings.spec)
            draft = method.load(settings.spec, models.target, lambda done, total: None)
            models = replace(models, proposer=fuse(settings.spec, draft) or draft, method=method)
        geometry = settle_geometry(settings, models, place)
        executor = build_executor(models, geometry, place, simulated_accept_lens=(COMMITTED,))
        yield row, executor, geometry
        executor.close()
        models = replace(models, proposer=None)
        del executor
        gc.collect()
        torch.cuda.empty_cache()


def begin(executor: Executor, geometry: Geometry, batch: int) -> None:
    """Prompts of random tokens in the first slots, each with pages of its own."""
    share = (geometry.num_pages - 1) // max(BATCHES)
    random = torch.Generator().manual_seed(0)
    for slot in range(batch):
        prompt = torch.randint(10, 500, (CONTEXT,), generator=random).tolist()
        pages = list(range(1 + slot * share, 1 + (slot + 1) * share))[: geometry.num_page_columns]
        reset = ResetSlot(GREEDY, len(prompt), (), 0)
        work = SlotPart(slot=slot, new_pages=pages, tokens=array("i", prompt).tobytes(), reset=reset)
        executor.launch(plan_of(0, [work], geometry.width)).wait()


def step_ms(executor: Executor, geometry: Geometry, batch: int, num_rounds: int) -> list[float]:
    """Of each round. A step is one graph on a GPU, operation by operation on a CPU."""
    begin(executor, geometry, batch)
    step, width = executor.decode_step, geometry.width
    slots = torch.arange(batch, device=executor.slots.length.device)
    columns = graph_sizes(executor, geometry, BATCHES).reach.columns(batch, width)[-1]

    def run() -> None:
        (rows,) = executor.eager.run_layers(StepShape(batch, width, columns), slots)
        step.decide(rows, GREEDY_WORK)
        step.draft(rows, GREEDY_WORK, width)

    with torch.inference_mode():
        run()
        if not slots.is_cuda:
            return [1000 * timeit.timeit(run, number=2) / 2 for _ in range(num_rounds)]
        torch.cuda.synchronize()
        recorder = CudaRecorder()
        replay, _ = recorder.record("step", run)
        torch.cuda.synchronize()
        return [replayed_ms(replay) for _ in range(num_rounds)]


def replayed_ms(replay: Callable[[], None]) -> float:
    """Of a graph, of which several are queued."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(STEPS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--defaults", action="store_true", help="default numbers over plain decoding")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of --defaults, at most")
    parser.add_argument("--train", metavar="TIME", help="the time limit of train-draft, of each kind")
    parser.add_argument("--kinds", nargs="+", choices=list(WINDOWS), default=list(WINDOWS), help="which are trained")
    parser.add_argument("--keep", metavar="DIR", help="where trained drafts stay; default: nowhere")
    parser.add_argument("--prompts", help="a file for train-draft")
    parser.add_argument("--num-tokens", type=int, default=256, help="of an answer, with --train")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="put the rows of these into --output")
    given, flags = parser.parse_known_args()
    if flags and not given.train or given.train and not given.prompts:
        parser.error(f"--train needs --prompts, and what goes to all commands goes with it: {flags}")
    return given, flags


def main() -> None:
    given, flags = arguments()
    if given.join:
        write_report(given.output, joined(given.join))
        return
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else device
    report: dict[str, Any] = {"benchmark": "drafters", "run": describe_run(name, 1), "committed": COMMITTED}
    report["rows"] = measured_before(given.output, report["run"])

    def write() -> None:
        if given.output is not None:
            write_report(given.output, report)

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(given.keep or scratch)
        directory.mkdir(parents=True, exist_ok=True)
        if given.train:
            digest = hashlib.sha256(Path(given.prompts).read_bytes()).hexdigest()
            report |= {"committed": None, "time_limit": given.train, "prompts_sha256": digest}
            asyncio.run(measure_trained(given, directory, flags, report, write))
            return
        directory = Path(scratch)
        write_shapes(directory, given.tiny)
        batches = BATCHES[:1] if given.tiny else BATCHES
        if given.defaults:
            report |= {"benchmark": "default_drafters", "engines": {}}
            run = Run(report, given.output, time.monotonic() + given.limit_s, rounds=2)
            asyncio.run(measure_defaults(directory, batches, run))
            return
        measured = {(row["drafter"], *row["numbers"]) for row in report["rows"]}
        rows = tuple(row for row in ROWS if (row.name, *row.numbers) not in measured)
        for row, executor, geometry in executors(directory, rows, device):
            for batch in batches:
                rounds = step_ms(executor, geometry, batch, 1 if given.tiny else ROUNDS)
                figures = {"step_ms": round(statistics.median(rounds), 3), "most_ms": round(max(rounds), 3)}
                report["rows"].append({"drafter": row.name, "numbers": row.numbers, "batch": batch, **figures})
                print(report["rows"][-1], flush=True)
            write()


if __name__ == "__main__":
    main()
