"""Times models that bring their own draft on a GPU, without server and scheduler, beside what their bytes take.

    python benchmarks/hybrids.py --output FILE             about 240 s on an H200
    python benchmarks/hybrids.py --only "9b plain" ..      some of the setups
    python benchmarks/hybrids.py --tiny                    on a CPU: tiny shapes, to see that everything runs

Weights are random with the true shapes of Qwen3.5-9B, Qwen3-Next-80B-A3B in fp8 and Gemma-4-31B, whose assistant has
four layers of 1,024 columns; routers are injected and counted as `mixtures.py` does it. Engines whose rows are in the
file already, of the same commit and device, are not measured again; the most important come first. Floors, at 4.23 TB/s
or 790 TFLOP/s:

    a step    weights that are read, of experts those that were counted; keys and values that layers attend to, with a
              window no more than that; states, read and written; of the draft its weights, head and keys, each guess
    prefill   operations of the experts of each row, of the other weights and of attention
    a turn    200 rows behind a cached context: the larger of both, all experts read

A cached turn is the step that a server takes after a hit: it does not copy the snapshot, 75 MB.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from mixture_routers import UNIFORM
from mixtures import CEILING, PAGE, ROUNDS, TINY, Bench, Report, Setup, figures, is_near, pages_of
from prefill_profile import Case, long_prompt, plans
from rows.setups import PLAIN, SPECULATIVE, SYNTHETIC, Flags, plain_shape, smaller
from step_profile import become_a_worker

from overlap_spec.config import EngineConfig, Machine
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.metrics.step_floor import forward_floor
from overlap_spec.models.drafts.assistant import AssistantWeights
from overlap_spec.models.layers.attention import AttentionShape, LayerShape
from overlap_spec.models.targets import mixture
from overlap_spec.worker.build import load_models, prepare_place

LONG, TURN = 32768, 200  # tokens of a prompt, and of a turn behind it
DRAWN = 16  # experts of a layer whose weights are drawn: those of the others are copies
HOT = 32768  # tokens of the map
CHAIN: Flags = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
NEXTN: Flags = SPECULATIVE | SYNTHETIC | CHAIN | {"speculative_algorithm": "NEXTN"}
NINE, NEXT = (plain_shape(name) for name in ("qwen3.5-9b", "qwen3-next-80b-a3b-fp8"))
ONE = ((1, (UNIFORM,)),)
DENSE = {key: value for key, value in TINY.items() if "expert" not in key and "moe" not in key}
DENSE |= {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "intermediate_size": 256}
DENSE |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
SPARSE = TINY | DENSE | {"shared_expert_intermediate_size": 128}
GEMMA = plain_shape("gemma-4-31b")
ASSISTED: Flags = NEXTN | GEMMA | {"speculative_draft_model_path": f"{GEMMA['model_path']}-assistant"}
WIDE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
WIDE |= {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64}
WIDE |= {"vocab_size": 2048, "layer_types": [*3 * ["sliding_attention"], "full_attention"]}
BOTH = (1024, 32768)
SETUPS = (
    Setup("9b plain", PLAIN | NINE, ONE, tiny=DENSE),
    Setup("9b NEXTN", NEXTN | NINE, ONE, tiny=DENSE),
    Setup("next fp8", PLAIN | NEXT, tuple((batch, (UNIFORM,)) for batch in (1, 8, 32)), (LONG,), tiny=SPARSE),
    Setup("9b NEXTN, token map", NEXTN | NINE, ONE, tiny=DENSE),
    Setup("31b plain", PLAIN | GEMMA, ONE, contexts=BOTH, tiny=WIDE),
    Setup("31b assistant", ASSISTED, ONE, contexts=BOTH, tiny=WIDE),
)
BY_NAME = {setup.name: setup for setup in SETUPS}
WITH_TURN, WITH_MAP = "next fp8", "9b NEXTN, token map"


class HybridBench(Bench):
    """One engine, whose floors know windows and states."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every decode step and prompt of the setup, and the turn behind the longest prompt."""
        yield from super().rows()
        if self.setup.name == WITH_TURN:
            yield self.turn(max(self.setup.prompts))

    def turn(self, context: int) -> dict[str, Any]:
        """A chunk behind a prompt whose keys and state are there."""
        chunks = (*long_prompt(context)[:-1], *(((slot, at, rows, True),) for ((slot, at, rows, _),) in _last(context)))
        steps = plans(Case("", 0, (*chunks, ((0, context, TURN, False),))), self.geometry.width)
        self.timed(lambda: self.launch(steps))
        seconds = min(self.timed(partial(self.launch, steps[-1:])) for _ in range(ROUNDS))
        work = self.roofline.target
        flop = work.row_flop * TURN + work.pair_flop * TURN * (context + TURN / 2) + work.head_flop
        read = self.target_bytes(1, context, self.routers.num_experts)
        floor = max(read / CEILING.bytes_per_s, flop / CEILING.flop_per_s)
        row = {"setup": self.setup.name, "prompt": context + TURN, "cached": context}
        return row | figures(seconds, floor, self.num_layers)

    def floor(self, batch: int, width: int, context: int, distinct: float) -> float:
        """Seconds of a step."""
        rows, of = batch * width, self.roofline
        flop = of.target.row_flop * rows + of.target.head_flop * rows + of.target.pair_flop * context * width
        moved = self.target_bytes(batch, context, distinct)
        seconds = max(moved / CEILING.bytes_per_s, flop / CEILING.flop_per_s)
        draft = getattr(self.models.proposer, "draft", None)
        if isinstance(draft, AssistantWeights):
            keys = sum(self.keys_of(layer.attention.shape, batch, context) for layer in draft.layers)
            seconds += (width - 1) * (of.draft.weight_bytes + keys) / CEILING.bytes_per_s
        elif width > 1:
            seconds += forward_floor(of, of.extend, rows, batch, context, context * width)
            seconds += (width - 2) * forward_floor(of, of.draft, batch, batch, context, context)
        return seconds

    def target_bytes(self, batch: int, context: int, distinct: float) -> float:
        """What a step of the target reads and writes. `context`: tokens of all requests."""
        layers = self.models.target.layers  # type: ignore[attr-defined]  # of a decoder
        more = len(self.routers.choices) * (distinct - self.routers.top_k) * self.expert_bytes
        keys = sum(self.keys_of(layer.attention.shape, batch, context) for layer in layers)
        states = 2 * batch * self.models.target.kv_shape.state.bytes_per_state(self.geometry.dtype)
        return self.roofline.target.weight_bytes + more + keys + states

    def keys_of(self, shape: LayerShape, batch: int, context: int) -> int:
        """Bytes of keys and values that a layer reads; none of one that recurs."""
        if not isinstance(shape, AttentionShape):
            return 0
        each = context // batch
        tokens = batch * (each if shape.window is None else min(shape.window, each))
        return 2 * tokens * shape.num_kv_heads * shape.head_dim * self.geometry.cache_dtype.itemsize


def _last(context: int) -> Any:
    return long_prompt(context)[-1:]


def alike(real: Any) -> Any:
    """`take_stored` that draws the weights of some experts: there are many, and only their bytes count."""
    drawn: dict[Any, Any] = {}

    def take(checkpoint: Any, scheme: Any, name: str, shape: tuple[int, int]) -> Any:
        *_, expert, linear = name.split(".")
        key = (int(expert) % DRAWN if expert.isdigit() else expert, linear, shape)
        if key not in drawn:
            drawn[key] = real(checkpoint, scheme, name, shape)
        return drawn[key]

    return take


def config_of(setup: Setup, machine: Machine) -> EngineConfig:
    """Of its engine: only the steps that are timed are captured, and nothing is kept of requests that have ended."""
    longest = max(*setup.contexts, *(length + TURN for length in setup.prompts), 0)
    own: Flags = {"max_running_requests": setup.most, "disable_radix_cache": True}
    most = max(setup.most * pages_of(max(setup.contexts)), pages_of(longest)) + pages_of(0)
    own |= {"context_length": PAGE * pages_of(longest), "max_total_tokens": PAGE * most}
    if machine.has_cuda:
        own |= {"cuda_graph_bs": tuple(sorted({batch for batch, _ in setup.batches}))}
    return config_from(setup.flags | own)


def measure(setup: Setup, machine: Machine) -> Iterator[dict[str, Any]]:
    """All rows of one engine, whose memory is free afterwards."""
    config = config_of(setup, machine)
    settings, _ = resolve(config, resolve_model(config), machine)
    with patch.object(mixture, "take_stored", alike(mixture.take_stored)):
        models = load_models(settings, prepare_place(settings), lambda done, total: None)
    bench = HybridBench(setup, settings, models)
    del models
    yield from bench.rows()
    bench.executor.close()
    del bench
    if machine.has_cuda:
        torch.cuda.empty_cache()


def with_map(setup: Setup, directory: Path, num_tokens: int) -> Setup:
    """The setup that has a map with one that is written here."""
    if setup.name != WITH_MAP:
        return setup
    path = directory / "map.pt"
    torch.save(list(range(num_tokens)), path)
    return replace(setup, flags=setup.flags | {"speculative_token_map": str(path)})


def chosen(setup: Setup, directory: Path, is_tiny: bool) -> Setup:
    """As it is measured."""
    setup = with_map(setup, directory, 256 if is_tiny else HOT)
    return tiny(setup, directory) if is_tiny else setup


def tiny(setup: Setup, directory: Path) -> Setup:
    """The same of a tiny shape, for a CPU."""
    path = smaller(setup.flags["model_path"], directory, setup.tiny)
    flags = setup.flags | {"device": "cpu", "dtype": "float32", "model_path": path}
    if "speculative_draft_model_path" in flags:
        flags |= {
            "speculative_draft_model_path": str(tiny_assistant(Path(flags["speculative_draft_model_path"]), Path(path)))
        }
    batches = tuple((min(batch, 4), kinds) for batch, kinds in setup.batches[:2])
    contexts = tuple(20 + index for index in range(len(setup.contexts)))
    return replace(setup, flags=flags, batches=batches, prompts=tuple(64 for _ in setup.prompts), contexts=contexts)


def tiny_assistant(path: Path, target: Path) -> Path:
    """Of the tiny target beside which it is written."""
    config = json.loads((path / "config.json").read_text())
    config["backbone_hidden_size"] = WIDE["hidden_size"]
    config["text_config"] |= WIDE
    small = target.with_name(path.name)
    small.mkdir(exist_ok=True)
    (small / "config.json").write_text(json.dumps(config))
    return small


def main() -> int:
    """Returns the exit status: 1 where experts are not as many as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--only", nargs="+", choices=BY_NAME)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    machine = Machine(8, has_cuda=not arguments.tiny)
    if machine.has_cuda:
        become_a_worker(config_of(SETUPS[0], machine))
    report = Report("hybrids", arguments.tiny, arguments.output)
    rows = report.rows
    with tempfile.TemporaryDirectory() as directory:
        for setup in (BY_NAME[name] for name in arguments.only or BY_NAME):
            found = [row for row in rows if row["setup"] == setup.name]
            if len(found) >= setup.num_rows + (setup.name == WITH_TURN):
                continue
            rows[:] = [row for row in rows if row not in found]
            for row in measure(chosen(setup, Path(directory), arguments.tiny), machine):
                report.keep(row)
    return 0 if all(map(is_near, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
