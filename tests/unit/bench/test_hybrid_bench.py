"""benchmarks/hybrids.py: floors by bytes, pages, that every row is measured."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrids
import pytest
import torch
from documents.result_tables import RENDERERS
from mixtures import MOST_AFTER, PAGE, NoRouters, Setup, pages_of
from overlap_spec_kernels.launch import assuming
from records.parts import HYBRID_ROWS, PARTS

from overlap_spec.config import EngineConfig, Machine
from overlap_spec.hub import resolve_model
from overlap_spec.models.loading.loader import load_target
from overlap_spec.speculative.drafts import NoDraft
from overlap_spec.speculative.methods import method_named
from overlap_spec.worker.startup.geometry import LoadedModels
from overlap_spec.worker.startup.start_costs import roofline

ROOT, BFLOAT, META = Path(__file__).parents[3], torch.bfloat16, torch.device("meta")
SHAPES = ROOT / "benchmarks/shapes"


def bench_of(name: str) -> hybrids.HybridBench:
    """Without values, as a GPU loads it."""
    flags: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    files = resolve_model(EngineConfig(model_path=str(SHAPES / name), **flags))
    bench = object.__new__(hybrids.HybridBench)
    with assuming((9, 0)):
        target = load_target(files, BFLOAT, META)
    bench.models = LoadedModels(target, NoDraft(), method_named("NONE"))
    bench.routers, bench.expert_bytes = NoRouters(), 0
    # what floors read of a geometry
    bench.geometry = SimpleNamespace(dtype=BFLOAT, cache_dtype=BFLOAT)  # type: ignore[assignment]
    bench.roofline = roofline(bench.models, BFLOAT, META, hybrids.CEILING)
    return bench


@pytest.mark.slow
def test_floors_of_a_step() -> None:
    """Weights, and what grows with requests and tokens: states, read and written, and keys."""
    nine, read = bench_of("qwen3.5-9b"), hybrids.CEILING.bytes_per_s
    assert 1000 * nine.floor(1, 1, 256, 0) == pytest.approx(3.78, abs=0.03)
    states = nine.floor(9, 1, 9 * 64, 0) - nine.floor(1, 1, 64, 0)
    of_keys = 8 * 2 * 64 * 4 * 256 * 2 * 8  # tokens, K and V, heads, columns, bytes, layers that attend
    of_state = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert states * read == pytest.approx(8 * 2 * of_state + of_keys, rel=0.01)


@pytest.mark.parametrize("setup", hybrids.SETUPS, ids=lambda setup: setup.name)
def test_pages_of_all_slots_fit(setup: Setup) -> None:
    config, longest = hybrids.config_of(setup, Machine(8, has_cuda=True)), max(*setup.contexts, *setup.prompts, 0)
    assert config.max_total_tokens is not None and config.context_length is not None
    assert config.max_total_tokens > setup.most * PAGE * pages_of(max(setup.contexts))
    assert min(config.max_total_tokens, config.context_length) >= longest + MOST_AFTER


def test_the_part_has_every_row() -> None:
    assert sum(setup.num_rows for setup in hybrids.SETUPS) + 1 == HYBRID_ROWS, "and the turn"
    (part,) = (part for part in PARTS if part.name == "hybrids")
    assert part.seconds <= 540


def test_experts_are_copies_of_a_few() -> None:
    taken: list[str] = []

    def real(checkpoint: Any, scheme: Any, name: str, shape: tuple[int, int]) -> str:
        taken.append(name)
        return name

    take = hybrids.alike(real)
    found = [take(None, None, f"layers.0.mlp.experts.{index}.up_proj", (2, 2)) for index in range(40)]
    assert len(taken) == len(set(found)) == hybrids.DRAWN
    assert take(None, None, "layers.0.mlp.experts.0.down_proj", (2, 2)) != found[0]


@pytest.mark.full
def test_it_runs_with_tiny_shapes(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/hybrids.py", "--tiny", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=False, timeout=250)
    rows = json.loads(output.read_text())["rows"]
    assert [row["setup"] for row in rows if "cached" in row] == ["next fp8"]
    assert {row["setup"] for row in rows} == {setup.name for setup in hybrids.SETUPS}
    assert all(row["floor_ms"] >= 0 and row["ms"] > 0 for row in rows)


def test_documents_show_steps_and_prompts() -> None:
    floor = {"ms": 4.2, "floor_ms": 3.8, "over_floor": 1.11}
    step = {"setup": "a", "batch": 1, "width": 4, "context": 1024}
    turn = {"setup": "b", "prompt": 32968, "cached": 32768}
    table = RENDERERS["hybrids"]({"rows": [step | floor, turn | floor]})
    assert table[-2:] == [
        "| a | 1 x 4 | 1,024 | 4.20 | 3.80 | 1.11x |",
        "| b | prompt of 32,968 | 32,768 | 4.20 | 3.80 | 1.11x |",
    ]
