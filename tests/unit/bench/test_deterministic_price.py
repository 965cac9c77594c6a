"""The engines whose steps `benchmarks/deterministic_price.py` times differ in the flag alone."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import deterministic_price
import msgspec
import pytest
import torch
from deterministic_price import CELLS, SHAPES, TRIES, Engine, config_of, measured_before, row_of, write_small_shapes
from documents.result_tables import RENDERERS

from overlap_spec.config import Machine
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.messages import StepPlan

GPU = Machine(8, has_cuda=True)


@pytest.mark.parametrize("cell", CELLS)
def test_the_flag_is_the_only_difference(tmp_path: Path, cell: str) -> None:
    write_small_shapes(tmp_path)
    found = []
    for flag in (False, True):
        config = config_of(cell, tmp_path if "SmolLM2" in cell else SHAPES, flag)
        found.append(resolve(config, resolve_model(config), GPU)[0])
    without, given = found
    assert given.model.deterministic and given.attention.target_in_order
    assert given.graph_batch_sizes == CELLS[cell].batches
    if "default" in cell:
        assert without.spec.topk > given.spec.topk == 1
        return
    assert given.spec.width == (4 if "chain" in cell else 1)
    model = msgspec.structs.replace(given.model, deterministic=False)
    attention = msgspec.structs.replace(given.attention, target_in_order=False)
    scheduler = msgspec.structs.replace(given.scheduler, deterministic=False)
    assert msgspec.structs.replace(given, model=model, attention=attention, scheduler=scheduler) == without


def test_small_shapes_are_smollm2s(tmp_path: Path) -> None:
    write_small_shapes(tmp_path)
    values = msgspec.json.decode((tmp_path / "smollm2" / "config.json").read_bytes())
    assert deterministic_price.SMOL.items() <= values.items() and values["num_hidden_layers"] == 30


def test_cells_of_the_same_code_are_not_measured_again(tmp_path: Path) -> None:
    output, run = tmp_path / "price.json", {"device": "a GPU", "versions": {"torch": "2"}, "source": {"commit": "1"}}
    assert measured_before(str(output), run) == []
    output.write_bytes(msgspec.json.encode({"run": run | {"when": "before"}, "rows": [{"cell": "8B plain"}]}))
    assert measured_before(str(output), run) == [{"cell": "8B plain"}]
    assert measured_before(str(output), run | {"source": {"commit": "2"}}) == []
    assert measured_before(str(output), run | {"before": {"overlap_spec/worker": "3"}}) == []


def test_medians_are_beside_those_of_the_other_tree() -> None:
    rounds = {"off": [4.0, 1.0, 5.0], "on": [5.0, 5.0, 9.0], "before": [8.0, 2.0, 2.0]}
    row = row_of("8B plain", "step", 8, rounds, dict.fromkeys(rounds, 4))
    assert (row["off_ms"], row["on_ms"], row["before_ms"]) == (4.0, 5.0, 2.0)
    assert row["price"] == 1.25 and row["to_before"] == {"off": 2.0, "on": 2.5} and "widths" not in row
    assert row_of("8B", "step", 8, rounds, {"off": 8, "on": 6, "before": 8})["widths"]["on"] == 6


@pytest.mark.parametrize(("flag", "output"), [(False, 0), (True, 300)])
def test_requests_go_on_behind_what_is_cached(monkeypatch: pytest.MonkeyPatch, flag: bool, output: int) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launched: list[StepPlan] = []
    executor = SimpleNamespace(launch=lambda plan: launched.append(plan) or SimpleNamespace(wait=list))
    geometry = SimpleNamespace(width=1, page_size=16, max_chunk=4096)
    times = deterministic_price.one_round(executor, geometry, CELLS["Qwen3.5-9B plain"], [[1, 2, 3]], flag)
    assert times.keys() == {("step", 1), ("step", 8), ("turn", 564), ("preempted", 364)}
    chunks = [(len(chunk.tokens) // 4, chunk.start, chunk.num_drawn) for plan in launched for chunk in plan.chunks]
    wholes = [(4096, 0, 0), (4096, 4096, 0)]
    turns = [*wholes, (500, 8192, 0), *TRIES * [(564, 8128, 0)]]
    assert chunks[8:] == [*turns, *wholes, (300, 8192, 0), *TRIES * [(364, 8128, output)]]


STAND_IN = """
import sys
from pathlib import Path
from types import SimpleNamespace
import deterministic_price as price

def built(config):
    print("said by an engine")
    return SimpleNamespace(close=Path(__file__).with_suffix(".closed").touch), SimpleNamespace(width=config)

price.built = built
price.config_of = lambda cell, scratch, flag: 4 + flag
price.one_round = lambda executor, geometry, *_: {("step", geometry.width): 1.5, ("prompt", 512): 100.0}
price.answer(sys.argv[2] == "on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "width"), [("off", 4), ("on", 5)])
def test_an_engine_is_asked_for_cells_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, width: int
) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(deterministic_price, "__file__", str(script))
    engine = Engine(flag)
    engine.ask("8B plain")
    assert engine.answer() == width and not script.with_suffix(".closed").exists()
    for _ in range(2):
        engine.ask()
        assert engine.answer() == [["step", width, 1.5], ["prompt", 512, 100.0]]
    engine.ask("8B chain")
    assert engine.answer() == width and script.with_suffix(".closed").exists()
    engine.close()


def test_the_table_has_a_row_for_each_cell() -> None:
    row = {"cell": "8B plain", "kind": "step", "size": 1, "off_ms": 3.7601, "on_ms": 3.9631, "price": 1.054}
    prompt = row | {"kind": "prompt", "size": 8192, "off_ms": 200.669, "on_ms": 257.0, "price": 1.281}
    trees = row | {"cell": "8B, default numbers", "widths": {"off": 10, "on": 4}}
    head, _, plain, defaults = RENDERERS["deterministic_price"]({"rows": [row, prompt, trees]})
    assert head == "| ms | batch 1 | a prompt of 8,192 |"
    beside = row | {"before_ms": 3.9, "to_before": {"off": 0.964, "on": 1.016}}
    (_, _, first) = RENDERERS["deterministic_price"]({"rows": [beside]})
    assert first == "| 8B plain | 3.76 to 3.963, **1.05**; 3.9 before: 0.96, **1.02** |"
    assert plain == "| 8B plain | 3.76 to 3.963, **1.05** | 200.7 to 257, **1.28** |"
    assert defaults.startswith("| 8B, default numbers (widths 10, 4) | 3.76 to")
    kinds = [row | {"kind": kind, "size": size} for kind, size in (("preempted", 364), ("turn", 564), ("step", 8))]
    head, _, _ = RENDERERS["deterministic_price"]({"rows": kinds})
    assert head == "| ms | batch 8 | a turn, 564 tokens | after a preemption, 364 tokens |"
