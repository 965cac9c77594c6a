"""Times a mixture of experts on a GPU, without server and scheduler, beside what its bytes take at least.

    python benchmarks/mixtures.py --output FILE        about 280 s on an H200
    python benchmarks/mixtures.py --only int4          one of bf16, chain, fp8, int4; not torch's grouped products
    python benchmarks/mixtures.py --others             gpt-oss-20b and GLM-4.7-Flash, about 140 s; --only takes one too
    python benchmarks/mixtures.py --tiny               on a CPU: a tiny shape, to see that everything runs

Weights are random with the true shape of Qwen3-30B-A3B or the others, and routers are injected (`mixture_routers.py`).
Rows that are in the file already, of the same commit and device, are not measured again. Of each row the distinct
experts of a layer are counted in steps that are not timed, beside their expectation. Floors:

    a step    (bytes of the distinct experts that were counted, of attention, routers and head in the types that they
              are stored in, and of keys and values) / 4.23 TB/s; of the draft what step efficiency counts
    prefill   operations of the experts of each row, of the other weights and of attention at 600 TFLOP/s
"""

import argparse
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from mixture_routers import SHARED, UNIFORM, ZIPF, Routers, expected_distinct, experts_of
from overlap_spec_kernels import Routing, experts_mlp, silu_mul
from prefill_profile import Case, long_prompt, plans
from rows.setups import CHAIN, PLAIN, SYNTHETIC, Flags, plain_shape, shape, smaller
from step_profile import become_a_worker, kernels
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig, Machine, Settings
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.messages import ChunkWork, ResetSlot, Roofline, SamplingParams, StepPlan
from overlap_spec.metrics.step_floor import Ceiling, step_floor
from overlap_spec.models.layers.experts import MixtureMLP
from overlap_spec.worker.build import build_executor, load_models, prepare_place
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry, LoadedModels, settle_geometry
from overlap_spec.worker.startup.start_costs import roofline
from overlap_spec.worker.startup.warmup import capture_graphs, cuda_prompt_lengths, precompiling, warm_up

NAME, QWEN = "qwen3-30b-a3b", (128, 8, 2048, 768)  # experts, experts of a row, hidden and inner columns
CHUNK = 8192  # rows
CEILING = Ceiling(4.23e12, 790e12)  # of an H200
PREFILL_FLOP_PER_S = 600e12
CONTEXT, PAGE = 256, 16  # tokens of a prompt; of a page
STEPS, ROUNDS, COUNTED = 40, 3, 16
MOST_AFTER = 768  # tokens after a prompt
LISTED = 10  # kernels of a step
GREEDY = SamplingParams(temperature=0.0, seed=0)
NEAR = 0.03  # of its expectation, in which the counted mean of distinct experts must be


Load = tuple[int | str, ...]  # a prompt's tokens, or requests, routers and tokens before them
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Setup:
    """An engine, its decode steps as (requests, routers) and tokens before them, and prompts. `tiny`: of its config."""

    name: str
    flags: Flags
    batches: tuple[tuple[int, tuple[str, ...]], ...]
    prompts: tuple[int, ...] = ()
    contexts: tuple[int, ...] = (CONTEXT,)
    tiny: dict[str, Any] = field(default_factory=lambda: TINY)

    @property
    def most(self) -> int:
        return max(batch for batch, _ in self.batches)

    @property
    def num_rows(self) -> int:
        """In the report."""
        return sum(len(kinds) for _, kinds in self.batches) * len(self.contexts) + len(self.prompts)

    @property
    def num_tokens(self) -> int:
        """Of all pages, when every slot has its longest context; one slot more, as a worker keeps one."""
        return PAGE * pages_of(max(self.contexts)) * (self.most + 1)


def pages_of(context: int) -> int:
    """Pages of a slot, for so many tokens and for the steps after them."""
    return -(-(context + MOST_AFTER) // PAGE)


ALL = (UNIFORM, ZIPF, SHARED)
LONG: Flags = {"context_length": 36864, "max_total_tokens": PAGE * pages_of(CONTEXT) * 129}  # of the largest batch
SETUPS = (
    Setup("bf16", PLAIN | plain_shape(NAME), ((1, (UNIFORM,)), (8, ALL), (32, ALL), (128, (UNIFORM,))), (8192, 32768)),
    Setup("chain", CHAIN | SYNTHETIC | shape(NAME), ((1, ALL), (8, (UNIFORM,)))),
    Setup("fp8", PLAIN | plain_shape(f"{NAME}-fp8"), ((1, (UNIFORM,)), (8, (UNIFORM,)), (32, (UNIFORM,))), (8192,)),
    Setup("int4", PLAIN | plain_shape(f"{NAME}-int4"), ((1, (UNIFORM,)), (8, (UNIFORM,)), (32, (UNIFORM,))), (8192,)),
)
TINY_OSS = {"num_local_experts": 16, "intermediate_size": 128}
TINY_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
TINY_LATENT |= {"qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 16, "intermediate_size": 256}
NEXTN = CHAIN | SYNTHETIC | {"speculative_algorithm": "NEXTN"}
OSS, GLM = plain_shape("gpt-oss-20b"), plain_shape("glm-4.7-flash")
ONE = ((1, (UNIFORM,)),)
OTHERS = (
    Setup("gpt-oss-20b", PLAIN | OSS, ONE, contexts=(1024,), tiny=TINY | TINY_OSS),
    Setup("glm-4.7-flash", PLAIN | GLM, ONE, contexts=(1024, 32768), tiny=TINY | TINY_LATENT),
    Setup("glm-4.7-flash NEXTN", NEXTN | GLM, ONE, contexts=(1024, 32768), tiny=TINY | TINY_LATENT),
)
TINY_DRAFT = {"vocab_size": 2048, "draft_vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
TINY_DRAFT |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY_DRAFT |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True}}


def tiny(setup: Setup, directory: Path) -> Setup:
    """The same of a tiny shape, for a CPU."""
    flags = setup.flags | {
        "model_path": smaller(setup.flags["model_path"], directory, setup.tiny),
        "device": "cpu",
        "dtype": "float32",
    }
    if "speculative_draft_model_path" in flags:
        draft = flags["speculative_draft_model_path"]
        flags |= {"speculative_draft_model_path": smaller(draft, directory, TINY_DRAFT)}
    batches = tuple((min(batch, 4), kinds) for batch, kinds in setup.batches[:2])
    contexts = tuple(20 + index for index in range(len(setup.contexts)))
    return replace(setup, flags=flags, batches=batches, prompts=tuple(64 for _ in setup.prompts), contexts=contexts)


class NoRouters:
    """Of a model without mixtures."""

    choices, num_experts, top_k = (), 0, 0

    def draw(self, kind: str, width: int) -> None:
        """Nothing is chosen."""

    def counted(self, num_rows: int) -> list[int]:
        """No expert is read."""
        return [0]


class Bench:
    """One engine whose routers are injected, if it has some."""

    def __init__(self, setup: Setup, settings: Settings, models: LoadedModels) -> None:
        self.setup, self.models = setup, models
        self.place = prepare_place(settings)
        mixtures = [layer.mlp for layer in models.target.layers if isinstance(layer.mlp, MixtureMLP)]  # type: ignore[attr-defined]  # of a decoder
        self.geometry: Geometry = settle_geometry(settings, models, self.place)
        most_rows = setup.most * self.geometry.width
        self.routers: Routers | NoRouters = NoRouters()
        self.expert_bytes = 0
        if mixtures:
            router = mixtures[0].router
            self.routers = Routers(len(mixtures), router.num_experts, router.choice.top_k, most_rows, self.place)
            self.expert_bytes = mixtures[0].experts.work.weight_bytes
        self.models = replace(models, target=self._injected())
        spec = settings.spec
        self.executor: Executor = build_executor(
            self.models,
            self.geometry,
            self.place,
            spec.accept,
            spec.simulated_accept_lens,
            settings.attention,
            settings=settings,
        )
        self.roofline: Roofline = roofline(models, self.geometry.dtype, self.place, CEILING, self.geometry.cache_dtype)
        self._start(settings)

    @property
    def is_cuda(self) -> bool:
        return self.place.type == "cuda"

    @property
    def num_layers(self) -> int:
        """Of the target, with experts or not."""
        return len(self.models.target.layers)  # type: ignore[attr-defined]  # of a decoder

    def _injected(self) -> Any:
        """The target, whose mixtures have the routers' choices."""
        choices, layers, target = iter(self.routers.choices), [], self.models.target
        for layer in target.layers:  # type: ignore[attr-defined]  # of a decoder
            if isinstance(layer.mlp, MixtureMLP):
                router = replace(layer.mlp.router, choice=next(choices))
                layer = replace(layer, mlp=replace(layer.mlp, router=router))
            layers.append(layer)
        return replace(target, layers=tuple(layers))  # type: ignore[type-var]  # a dataclass

    def _start(self, settings: Settings) -> None:
        if not self.is_cuda:
            warm_up(self.executor, self.geometry, (), 16)
            return
        with precompiling(settings, self.executor, self.geometry):
            warm_up(self.executor, self.geometry, cuda_prompt_lengths(self.geometry), decodes=False)
            capture_graphs(self.executor, self.geometry, settings.graph_batch_sizes)

    def rows(self, done: Collection[Load] = ()) -> Iterator[dict[str, Any]]:
        """Every decode step and prompt of the setup but those that are `done`."""
        for batch, kinds in self.setup.batches:
            for kind, context in product(kinds, self.setup.contexts):
                if (batch, kind, context) not in done:
                    yield self.decode(batch, kind, context)
        self.routers.draw(UNIFORM, 1)
        for num_tokens in self.setup.prompts:
            if (num_tokens,) not in done:
                yield self.prefill(num_tokens)

    def fill(self, batch: int, context: int) -> None:
        """Put a prompt into each of these slots, with pages for all steps of a row."""
        reset, count = ResetSlot(GREEDY, context, (), context), pages_of(context)
        most = min(CHUNK, self.geometry.max_chunk)
        for slot, start in product(range(batch), range(0, context, most)):
            rows, is_first = min(most, context - start), start == 0
            tokens = array("i", (1000 + place % 1000 for place in range(start, start + rows))).tobytes()
            chunk = ChunkWork(slot, start, tokens, -1 if start + rows == context else 7)
            pages = {slot: [1 + slot * count + page for page in range(count)]} if is_first else {}
            resets = {slot: reset} if is_first else {}
            self.executor.launch(StepPlan(0, self.geometry.width, [], pages, [chunk], resets)).wait()

    def decode(self, batch: int, kind: str, context: int) -> dict[str, Any]:
        """A step of so many requests, with these routers, after so many tokens each."""
        width, routers = self.geometry.width, self.routers
        plan = StepPlan(0, width, list(range(batch)))
        routers.draw(kind, width)
        self.fill(batch, context)
        steps = STEPS if self.is_cuda else 3
        self.timed(lambda: self.launch([plan] * (steps // 4 + 1)))
        seconds = statistics.median(self.timed(lambda: self.launch([plan] * steps)) / steps for _ in range(ROUNDS))
        found = []
        for _ in range(COUNTED):
            self.executor.launch(plan).wait()
            found += routers.counted(batch * width)
        distinct = statistics.fmean(found)
        floor = self.floor(batch, width, batch * context, distinct)
        row = {"setup": self.setup.name, "batch": batch, "width": width, "context": context, "routers": kind}
        row |= figures(seconds, floor, self.num_layers)
        if routers.num_experts:
            expected = expected_distinct(kind, batch, width, routers.num_experts, routers.top_k)
            row |= {"distinct": round(distinct, 2), "expected_distinct": round(expected, 2)}
        if self.is_cuda and batch == 1:
            row |= kernels(self.executor, plan)
            row["kernels"] = row["kernels"][:LISTED]
        return row

    def floor(self, batch: int, width: int, context: int, distinct: float) -> float:
        """Seconds of a step."""
        more = len(self.routers.choices) * (distinct - self.routers.top_k) * self.expert_bytes
        target = msgspec.structs.replace(
            self.roofline.target, weight_bytes=int(self.roofline.target.weight_bytes + more)
        )
        return step_floor(msgspec.structs.replace(self.roofline, target=target), batch, width, context)

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """A prompt, in chunks."""
        steps = plans(Case("", 0, long_prompt(num_tokens)), self.geometry.width)
        self.timed(lambda: self.launch(steps))
        seconds = min(self.timed(lambda: self.launch(steps)) for _ in range(ROUNDS))
        work, pairs = self.roofline.target, num_tokens * (num_tokens + 1) / 2
        flop = work.row_flop * num_tokens + work.pair_flop * pairs + work.head_flop
        row = {"setup": self.setup.name, "prompt": num_tokens}
        return row | figures(seconds, flop / PREFILL_FLOP_PER_S, self.num_layers)

    def launch(self, steps: Sequence[StepPlan]) -> None:
        """Queue all of them."""
        for plan in steps:
            self.executor.launch(plan)

    def timed(self, run: Callable[[], None]) -> float:
        """Seconds until all is done."""
        synchronize = torch.cuda.synchronize if self.is_cuda else nullcontext
        synchronize()
        begun = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - begun


def figures(seconds: float, floor: float, num_layers: int) -> dict[str, float]:
    """A time beside its floor."""
    return {
        "ms": round(1000 * seconds, 4),
        "floor_ms": round(1000 * floor, 4),
        "over_floor": round(seconds / floor, 3),
        "us_a_layer_over_floor": round(1e6 * (seconds - floor) / num_layers, 2),
    }


def is_near(row: dict[str, Any]) -> bool:
    """Whether the experts that were counted are as many as expected."""
    return "distinct" not in row or abs(row["distinct"] / row["expected_distinct"] - 1) <= NEAR


def config_of(setup: Setup, machine: Machine) -> EngineConfig:
    """Of its engine: only the steps that are timed are captured."""
    own: Flags = {"context_length": 512, "max_total_tokens": setup.num_tokens}
    if machine.has_cuda:
        own = LONG | {"cuda_graph_bs": tuple(sorted({batch for batch, _ in setup.batches}))}
    return config_from(setup.flags | own | {"max_running_requests": setup.most})


def load_of(row: dict[str, Any]) -> Load:
    """What a row of a setup is of."""
    return (row["prompt"],) if "prompt" in row else (row["batch"], row["routers"], row["context"])


def measure(setup: Setup, machine: Machine, done: Collection[Load] = ()) -> Iterator[dict[str, Any]]:
    """The rows of one engine that are not `done`. Its memory is free afterwards."""
    config = config_of(setup, machine)
    settings, _ = resolve(config, resolve_model(config), machine)
    bench = Bench(setup, settings, load_models(settings, prepare_place(settings), lambda done, total: None))
    yield from bench.rows(done)
    bench.executor.close()
    del bench
    if machine.has_cuda:
        torch.cuda.empty_cache()


def grouped_products(place: torch.device, num_rows: int, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """The experts of a prompt's rows: our kernels, sums included, beside torch's grouped products of sorted rows.

    `sizes`: experts, experts of a row, hidden and inner columns.
    """
    num_experts, top_k, hidden, inner = sizes
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    x, gate_up, down = (
        torch.randn(shape, device=place, dtype=dtype)
        for shape in ((num_rows, hidden), (num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
    )
    experts = experts_of(UNIFORM, num_rows, 1, num_experts, top_k, place)
    routing = Routing(experts.contiguous(), torch.full(experts.shape, 1 / top_k, device=place))

    def of_torch() -> Tensor:
        flat = routing.experts.flatten()
        order = flat.argsort()
        ends = torch.bincount(flat, minlength=num_experts).cumsum(0).int()
        gated = silu_mul(torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends))
        return torch._grouped_mm(gated, down.transpose(1, 2), offs=ends)

    row: dict[str, Any] = {"setup": "grouped", "rows": num_rows}
    row["ours_ms"] = milliseconds(lambda: experts_mlp(x, gate_up, down, routing), place)
    try:
        row["torch_ms"] = milliseconds(of_torch, place)
    except (RuntimeError, AttributeError) as error:  # where it has none for this place or type
        row["refused"] = str(error).partition("\n")[0][:200]
    flop = 2 * num_rows * top_k * 3 * hidden * inner
    return row | {"floor_ms": round(1000 * flop / PREFILL_FLOP_PER_S, 4)}


def milliseconds(run: Callable[[], object], place: torch.device, rounds: int = 10) -> float:
    """Of one of several in a row."""
    synchronize = torch.cuda.synchronize if place.type == "cuda" else nullcontext
    run()
    synchronize()
    begun = time.perf_counter()
    for _ in range(rounds):
        run()
    synchronize()
    return round(1000 * (time.perf_counter() - begun) / rounds, 4)


def print_row(row: dict[str, Any]) -> None:
    if row["setup"] == "grouped":
        print(row, flush=True)
        return
    what = (
        f"prompt of {row['prompt']}"
        if "prompt" in row
        else f"batch {row['batch']} x {row['width']} {row['routers']} behind {row['context']}"
    )
    experts = f"; {row['distinct']} experts, {row['expected_distinct']} expected" if "distinct" in row else ""
    print(
        f"{row['setup']:19} {what:32} {row['ms']:9.3f} ms, floor {row['floor_ms']:9.3f}, x {row['over_floor']:6.3f},"
        f" {row['us_a_layer_over_floor']:7.1f} us a layer over it{experts}",
        flush=True,
    )


def main() -> int:
    """Returns the exit status: 1 where experts are not as many as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--only", choices=[setup.name for setup in SETUPS + OTHERS])
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    machine = Machine(8, has_cuda=not arguments.tiny)
    if machine.has_cuda:
        become_a_worker(config_of(SETUPS[0], machine))
    report = Report("mixtures", arguments.tiny, arguments.output)
    rows, keep = report.rows, report.keep
    names = {arguments.only} if arguments.only else {each.name for each in (OTHERS if arguments.others else SETUPS)}
    with tempfile.TemporaryDirectory() as directory:
        for setup in SETUPS + OTHERS:
            chosen = tiny(setup, Path(directory) / setup.name) if arguments.tiny else setup
            found = [row for row in rows if row["setup"] == setup.name]
            if setup.name in names and len(found) < chosen.num_rows:
                for row in measure(chosen, machine, {load_of(row) for row in found}):
                    keep(row)
        if "int4" in names and arguments.only is None and not any(row["setup"] == "grouped" for row in rows):
            place = torch.device("cpu" if arguments.tiny else "cuda")
            keep(grouped_products(place, *((64, (16, 4, 128, 128)) if arguments.tiny else (CHUNK, QWEN))))
    return 0 if all(map(is_near, rows)) else 1


class Report:
    """Rows, written after each. Those that the file has already, of the same code and device, are there at first."""

    def __init__(self, benchmark: str, is_tiny: bool, output: str | None) -> None:
        run = describe_run("cpu" if is_tiny else torch.cuda.get_device_name(), torch.get_num_threads())
        self.rows, self._output = rows_before(output, run), output
        self._report = {"benchmark": benchmark, "run": run, "rows": self.rows}

    def keep(self, row: dict[str, Any]) -> None:
        """Add one, and print it."""
        self.rows.append(row)
        print_row(row)
        if self._output:
            write_report(self._output, self._report)


def rows_before(output: str | None, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the file, if the same code was measured on the same device."""
    if output is None or not Path(output).exists():
        return []
    report = json.loads(Path(output).read_text())
    is_same = all(report["run"].get(key) == run.get(key) for key in ("device", "commit", "source"))
    return list(report["rows"]) if is_same else []


if __name__ == "__main__":
    raise SystemExit(main())
