"""The settings to reduce when memory runs out, in order, and the memory that each frees, by the worker's own budget.

    python benchmarks/memory_guide.py --output benchmarks/results/memory_guide.json

Nothing is loaded: the shape is Llama-3.1-8B with an EAGLE-3 head, with tensors without memory, and the tree (5, 8, 64)
of older versions of SGLang's page. A server on a GPU reports the same for its own configuration in its start-up table
(`to save memory`), and in the error of a start that does not fit.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import MIB, EngineConfig, Machine, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.models.drafts.eagle3 import Eagle3Config, load_eagle3
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.checkpoint import Shape
from overlap_spec.models.loading.dummy import spread_target_ids
from overlap_spec.models.loading.loader import read_target_config
from overlap_spec.models.targets.llama import load_llama
from overlap_spec.speculative.drafts import ChainDraft, TreeDraft
from overlap_spec.speculative.methods import method_named
from overlap_spec.speculative.proposers.tree import Branching
from overlap_spec.worker.startup.geometry import LoadedModels, demand_of, torch_dtype
from overlap_spec.worker.startup.memory_budget import Demand, savings

ROOT = Path(__file__).parent.parent
SHAPES = Path("benchmarks/shapes")
TARGET, HEAD = SHAPES / "llama-3.1-8b", SHAPES / "llama-3.1-8b-eagle3"
GPU = Machine(num_cores=16, has_cuda=True)
SHARE = 0.1  # of memory, by which --mem-fraction-static is lowered


class WithoutMemory:
    """`Weights` of any shape, counted as they are taken."""

    scheme = division = None

    def __init__(self, origin: Path, dtype: torch.dtype, target_ids: Tensor | None = None) -> None:
        self.origin = str(origin)
        self.num_bytes = 0
        self._dtype = dtype
        self._raw = {} if target_ids is None else {"d2t": target_ids - torch.arange(len(target_ids))}

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def names(self) -> frozenset[str]:
        return frozenset(self._raw)

    def covers(self, name: str) -> bool:
        return False

    def shape(self, name: str) -> Shape:
        return tuple(self._raw[name].shape)

    def file_of(self, name: str) -> str:
        return self.origin

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        weight = torch.empty(shape, dtype=dtype or self._dtype, device="meta")
        self.num_bytes += weight.nbytes
        return weight

    def take_grouped(self, shapes: object, biases: object) -> None:
        return None

    def take_raw(self, name: str, shape: Shape = ()) -> Tensor:
        return self._raw[name]

    def skip(self, *names: str) -> None:
        pass

    def finish(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--gpu-mib", type=int, default=80 * 1024, help="memory of the GPU")
    arguments = parser.parse_args()
    run = describe_run("cpu", 1)
    settings = settled()
    report = {"benchmark": "memory_guide", "run": run, **guide(settings, demand(settings), arguments.gpu_mib)}
    write_report(arguments.output, report)
    for row in report["figures"]:
        print(row)


def settled() -> Settings:
    config = EngineConfig(
        model_path=str(ROOT / TARGET),
        load_format="dummy",
        skip_tokenizer_init=True,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(ROOT / HEAD),
        speculative_num_steps=5,
        speculative_eagle_topk=8,
        speculative_num_draft_tokens=64,
    )
    return resolve(config, resolve_model(config), GPU)[0]


def demand(settings: Settings) -> Demand:
    """Of the two shapes, with these settings."""
    dtype, spec = torch_dtype(settings.model.dtype), settings.spec
    of_target = WithoutMemory(TARGET, dtype)
    target = load_llama(read_target_config(settings.model.files), of_target)
    of_head, head = _head(target, dtype)
    draft = TreeDraft(ChainDraft(head, spec.num_steps), Branching(spec.num_steps, spec.topk))
    models = LoadedModels(target, draft, method_named(spec.method))
    return replace(demand_of(settings, models), target_weights=of_target.num_bytes, draft_weights=of_head.num_bytes)


def _head(target: LoadedTarget, dtype: torch.dtype) -> tuple[WithoutMemory, Any]:
    found = json.loads((ROOT / HEAD / "config.json").read_text())
    config = Eagle3Config.from_hf(found, target.num_layers, str(HEAD))
    weights = WithoutMemory(HEAD, dtype, spread_target_ids(config.draft_vocab_size, target.vocab_size))
    return weights, load_eagle3(config, weights, target)


def guide(settings: Settings, demand: Demand, gpu_mib: int) -> dict[str, Any]:
    """Figures in MiB, for as many tokens in the KV pool as before, and in tokens that the pool can hold instead."""
    kv = demand.target_kv + demand.draft_kv
    pool = int(gpu_mib * MIB * settings.cache.mem_fraction) - demand.num_bytes
    rows = [
        {
            "flag": saving.flag,
            "mib": (saving.num_bytes + pool // kv * saving.kv_bytes) // MIB,
            "tokens": (pool + saving.num_bytes) // (kv - saving.kv_bytes) - pool // kv,
        }
        for saving in savings(demand)
    ]
    lower = settings.cache.mem_fraction - SHARE
    share = {"flag": f"--mem-fraction-static {lower:.2f}", "mib": int(gpu_mib * SHARE), "tokens": 0}
    share["tokens"] = -(share["mib"] * MIB // kv)
    after = 1 + sum(row["flag"].startswith("--speculative-eagle-topk") for row in rows)
    return {
        "gpu_mib": gpu_mib,
        "target": TARGET.name,
        "draft": HEAD.name,
        "numbers": [settings.spec.num_steps, settings.spec.topk, settings.spec.width],
        "max_running_requests": demand.max_running_requests,
        "taken_mib": {
            "target weights": demand.target_weights // MIB,
            "draft weights": demand.draft_weights // MIB,
            "workspace": demand.workspace // MIB,
            "trees": demand.scratch // MIB,
        },
        "pool_tokens": pool // kv,
        "kv_bytes_per_token": kv,
        "figures": [*rows[:after], share, *rows[after:]],
    }


if __name__ == "__main__":
    main()
