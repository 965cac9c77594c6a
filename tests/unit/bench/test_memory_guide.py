"""The documents' table of what to turn down is what the worker's sum says today."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from documents.result_tables import render

ROOT = Path(__file__).parents[3]
REPORT = json.loads((ROOT / "benchmarks/results/memory_guide.json").read_text())


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_guide", ROOT / "benchmarks/memory_guide.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_figures_are_those_of_the_sum() -> None:
    guide = script()
    settings = guide.settled()
    made = json.loads(json.dumps(guide.guide(settings, guide.demand(settings), REPORT["gpu_mib"])))
    assert made == {name: REPORT[name] for name in made}, "run: python benchmarks/memory_guide.py --output .."


def test_the_weights_are_those_of_the_shapes() -> None:
    """By hand: 32 layers of Llama-3.1-8B, embedding and head, two bytes each."""
    hidden, inner, vocab, kv = 4096, 14336, 128256, 1024
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    assert REPORT["taken_mib"]["target weights"] == 2 * (32 * layer + 2 * vocab * hidden + hidden) >> 20
    assert REPORT["kv_bytes_per_token"] == 2 * 2 * kv * (32 + 1)


def test_its_table_names_flags_in_the_order_of_the_guide() -> None:
    rows = render(REPORT).splitlines()
    assert rows[0] == "| turned down | frees, MiB | tokens in the KV pool |"
    assert rows[2].startswith("| `--speculative-num-draft-tokens 16` | 2622 |")
