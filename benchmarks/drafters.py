"""Times a decode step with each drafter on one target, chains and trees, at the shape of Llama-3.1-8B.

    python benchmarks/drafters.py --output benchmarks/results/drafters_h200.json      five minutes at first
    python benchmarks/drafters.py --tiny                                              on a CPU, to see that it runs
    python benchmarks/drafters.py --train 110s --prompts FILE.jsonl --output FILE     about eight minutes

Weights are random: the drafts have the layers of the published ones, and acceptance is synthetic, 2.5 tokens a step.
The target is loaded once. A step of greedy requests, its draft included, is one CUDA graph, and several are queued:
this is the device's time, which no host holds up. The median of the rounds counts. A drafter takes ten seconds, and
twice that where its kernels are not compiled yet. FILE is written after each; with the same code, the next run leaves
out what is in it.

With `--train` the drafters are made: `train-draft` makes one of each kind for SmolLM2, with the same prompts and in the
same time, and each answers chat20 with each of its windows. Accept lengths are real then.
"""

import argparse
import gc
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
from array import array
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import _tests_path
import msgspec
import torch
from deterministic_price import measured_before
from support.plans import SlotPart, plan_of

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig, Machine, Settings
from overlap_spec.config.resolve import resolve
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


WINDOWS = {"EAGLE3": ((3, 1, 4), (7, 1, 8)), "DFLASH": ((3, 1, 4), (7, 1, 8)), "DSPARK": ((3, 1, 4), (7, 1, 8))}
LAST_LINE = re.compile(r"([\d,]+) steps")


def trained(
    time_limit: str, prompts: str, directory: Path, flags: list[str], known: Container[str]
) -> Iterator[dict[str, Any]]:
    """A row for each window of each kind that is trained and not known. What fails is said, and left out."""
    for method, windows in WINDOWS.items():
        if method in known:
            continue
        draft = directory / method
        order = ["--method", method, "--prompts", prompts, "--output", str(draft), "--time-limit", time_limit]
        said = called("train-draft", *order, *flags)
        if said is None:
            continue
        steps = LAST_LINE.findall(said)
        for num_steps, topk, width in windows:
            out = directory / f"{method}-{num_steps}.json"
            numbers = ["--speculative-num-steps", num_steps, "--speculative-eagle-topk", topk]
            numbers += ["--speculative-num-draft-tokens", width, "--speculative-draft-model-path", draft]
            given = ["--with-plain", "--prompts", "chat20", "--speculative-algorithm", method, "--output", out]
            if called("bench", "latency", *map(str, given + numbers), *flags) is None:
                continue
            found = json.loads(out.read_text())
            engine, plain = found["engine"], found["plain"]
            row = {
                "drafter": method,
                "numbers": [num_steps, topk, width],
                "training_steps": int(steps[-1].replace(",", "")) if steps else 0,
            }
            row |= {key: engine[key] for key in ("accept_length", "step_ms", "tokens_per_second")}
            yield row | {"over_plain": round(engine["tokens_per_second"] / plain["tokens_per_second"], 3)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train", metavar="TIME", help="the time limit of train-draft, of each kind")
    parser.add_argument("--prompts", help="a file for train-draft")
    arguments, flags = parser.parse_known_args()
    if flags and not arguments.train or arguments.train and not arguments.prompts:
        parser.error(f"--train needs --prompts, and what goes to all commands goes with it: {flags}")
    device = "cpu" if arguments.tiny else "cuda"
    name = torch.cuda.get_device_name() if device == "cuda" else device
    report: dict[str, Any] = {"benchmark": "drafters", "run": describe_run(name, 1), "committed": COMMITTED}
    report["rows"] = known = measured_before(arguments.output, report["run"])
    with tempfile.TemporaryDirectory() as directory:
        if arguments.train:
            digest = hashlib.sha256(Path(arguments.prompts).read_bytes()).hexdigest()
            report |= {"committed": None, "time_limit": arguments.train, "prompts_sha256": digest}
            kinds = {row["drafter"] for row in known}
            for figures in trained(arguments.train, arguments.prompts, Path(directory), flags, kinds):
                report["rows"].append(figures)
                print(figures, flush=True)
                if arguments.output is not None:
                    write_report(arguments.output, report)
            return
        write_shapes(Path(directory), arguments.tiny)
        measured = {(row["drafter"], *row["numbers"]) for row in known}
        rows = tuple(row for row in ROWS if (row.name, *row.numbers) not in measured)
        for row, executor, geometry in executors(Path(directory), rows, device):
            for batch in BATCHES[:1] if arguments.tiny else BATCHES:
                rounds = step_ms(executor, geometry, batch, 1 if arguments.tiny else ROUNDS)
                figures = {"step_ms": round(statistics.median(rounds), 3), "most_ms": round(max(rounds), 3)}
                report["rows"].append({"drafter": row.name, "numbers": row.numbers, "batch": batch, **figures})
                print(report["rows"][-1], flush=True)
            if arguments.output is not None:
                write_report(arguments.output, report)


if __name__ == "__main__":
    main()
