"""Every committed figure was measured with the versions that a constraints file pins.

A GPU's figures (`*_h200*.json`, `h200/*.json`) belong to constraints-cuda.txt, a CPU's to constraints.txt. triton
compiles kernels for a GPU, and no engine on a CPU calls it: there its version is a fact of the environment, and is not
compared.
`full_tests_cpu.json` and `model_matrix.json` hold tests, not figures: they ran where there was time, on either CPU.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records.parts import PARTS
from support.pinned_versions import CUDA, ROOT, TESTED, pins_of

RESULTS = ROOT / "benchmarks" / "results"
TESTS_ON_ANY_CPU = "frontend_restart_cpu.json", "full_tests_cpu.json", "model_matrix.json"
# Of a machine that had a numpy of its own; what the file measures does not use it.
ANY_NUMPY = (
    *("mixtures_h200.json", "ranks_h200.json", "hybrids_h200.json", "tables-279066224e8f.json"),
    *("adapt_draft_h200.json", "trained_draft_h200.json", "trained_drafters_h200.json"),
    *("drafters_h200.json", "default_drafters_h200.json", "hybrid_proofs_h200.json"),
    *(f"never_slower{part}_h200.json" for part in ("", "_few", "_more", "_smollm2")),
    *("recovery_8b_h200.json", "real_traffic_h200-9cade6459787.json"),
    *("throughput_chain_h200.json", "throughput_tree_h200.json"),
    *(
        "deterministic_price_h200.json",
        "soak_h200.json",
        "tp2-8336ee78a716.json",
        "bits_h200.json",
    ),
    *("frontend_restart_cpu.json", "model_matrix.json"),
)
GPU_ONLY = {"triton"}
DIFFERENT = {"torch", "triton"}


def runs_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every record with versions in a result file."""
    if isinstance(value, dict):
        if isinstance(value.get("versions"), dict):
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from runs_in(inner)


def differences(run: dict[str, Any], pins: dict[str, str], ignored: frozenset[str] = frozenset()) -> dict[str, str]:
    """What a run had that the pins do not say; a build of a version ("2.13.0+cpu") is that version."""
    had = {name: version.partition("+")[0] for name, version in run["versions"].items()}
    return {name: had[name] for name in had.keys() & pins.keys() - ignored if had[name] != pins[name]}


def is_of_a_gpu(path: Path) -> bool:
    is_of_a_record = path.parent.name in {card for part in PARTS for card in part.cards}
    return is_of_a_record or "h200" in path.stem.partition("-")[0].split("_")  # a commit may follow


CLIENTS = RESULTS / "clients"  # checks by other packages, whose versions are pinned beside the script that runs them
FILES = sorted(
    path for path in RESULTS.rglob("*.json") if path.parent != CLIENTS and list(runs_in(json.loads(path.read_text())))
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_figures_belong_to_pinned_versions(path: Path) -> None:
    runs = list(runs_in(json.loads(path.read_text())))
    assert all("torch" in run["versions"] for run in runs)
    if is_of_a_gpu(path):
        ignored = frozenset({"numpy"} if path.name in ANY_NUMPY else ())
        assert not [found for run in runs if (found := differences(run, pins_of(CUDA), ignored))]
        return
    assert {run["device"] for run in runs} == {"cpu"}
    sets = [TESTED, CUDA] if path.name in TESTS_ON_ANY_CPU else [TESTED]
    ignored = frozenset(GPU_ONLY | {"numpy"} if path.name in ANY_NUMPY else GPU_ONLY)
    for run in runs:
        found = [differences(run, pins_of(file), ignored) for file in sets]
        assert {} in found, (run, found)


def test_there_are_figures_of_both() -> None:
    assert len([path for path in FILES if is_of_a_gpu(path)]) >= 15
    assert len([path for path in FILES if not is_of_a_gpu(path)]) >= 8


def test_the_two_sets_differ_where_they_must() -> None:
    tested, cuda = pins_of(TESTED), pins_of(CUDA)
    assert {name for name in cuda if cuda[name] != tested[name]} == DIFFERENT
