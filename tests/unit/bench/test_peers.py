"""Other engines' figures are those of their lines, the hardest on us; ours are the newest; README agrees with them."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from documents.beside import HEAD, Row, behind, compared, peers_table, speeds, times
from documents.figures import FIGURES, Results
from documents.own import own_cells, own_reports
from documents.peers import CHAIN, FIRST, LLAMA, PEERS, PLAIN, SGLANG, SMOLLM2, VLLM, Cell, Figure
from documents.result_tables import DEFAULT_NUMBERS, NOT_MEASURED, record_table
from documents.step_chart import chart
from records.reader import MixedCards

ROOT = Path(__file__).parents[3]
MEASURE = ROOT / VLLM.folder / "measure.py"
ROWS = compared(ROOT)


def line(config: str, batch: int, step_ms: float, speed: float, first_s: float, **more: Any) -> dict[str, Any]:
    figures = {"ms_per_verify_step": step_ms, "ms_per_tok_seq": 9.0, "decode_tok_s": speed, "prefill_s": first_s}
    return {"config": config, "bs": batch, "kind": "batch", "in": 42.0} | figures | more


def test_of_several_modes_the_one_that_is_hardest_on_us_counts() -> None:
    cells = SGLANG.read(
        [
            line("smol-eagle3-3-1-4", 8, 4.0, 900.0, 0.03),
            line("smol-eagle3-3-1-4-sync", 8, 3.5, 800.0, 0.02),
            line("smol-nospec", 8, 2.0, 700.0, 0.01) | {"kind": "stream"},
            line("smol-ngram-16", 8, 0.1, 9999.0, 0.001),
            {"config": "smol-nospec", "kind": "info"},
        ]
    )
    assert cells == {
        Cell(SMOLLM2, CHAIN, 8): Figure(3.5, 900.0, "smol-eagle3-3-1-4-sync"),
        Cell(SMOLLM2, FIRST, 8): Figure(20.0, 0.0, "smol-eagle3-3-1-4-sync"),
    }


def test_one_token_of_random_prompts_is_not_one_of_chats() -> None:
    first = {"kind": "first", "bs": 1, "in": 128, "wall_ms_best": 7.0}
    assert VLLM.read([first | {"config": "8b-plain"}]) == {Cell(LLAMA, FIRST, 1): Figure(7.0, 0.0, "8b-plain")}
    assert VLLM.read([first | {"config": "smol-plain"}]) == {}


@pytest.mark.parametrize(
    ("peer", "cell", "figure"),
    [  # read by hand from the lines
        (SGLANG, Cell(SMOLLM2, PLAIN, 64), Figure(1.4728, 43454.5, "smol-nospec")),
        (SGLANG, Cell(SMOLLM2, CHAIN, 1), Figure(3.192, 548.3, "smol-eagle3-3-1-4-sync")),
        (SGLANG, Cell(LLAMA, "EAGLE-3 tree (5, 8, 32)", 8), Figure(12.736, 1604.9, "8b-eagle3-5-8-32")),
        (SGLANG, Cell(LLAMA, FIRST, 8), Figure(27.6, 0.0, "8b-nospec")),
        (VLLM, Cell(LLAMA, PLAIN, 1), Figure(4.7402, 211.0, "8b-plain")),
        (VLLM, Cell(LLAMA, CHAIN, 256), Figure(29.9383, 19822.6, "8b-eagle3")),
        (VLLM, Cell(LLAMA, CHAIN, 1, 8192), Figure(6.2655, 405.4, "8b-eagle3")),
        (VLLM, Cell(LLAMA, FIRST, 1, 8192), Figure(205.4, 0.0, "8b-plain")),
        (VLLM, Cell(LLAMA, FIRST, 1, 32768), Figure(1191.2, 0.0, "8b-plain")),
        (VLLM, Cell(SMOLLM2, FIRST, 8), Figure(18.6, 0.0, "smol-eagle3")),
    ],
)
def test_lines_read_by_hand(peer: Any, cell: Cell, figure: Figure) -> None:
    assert peer.cells(ROOT)[cell] == figure


def test_without_lines_there_is_no_figure(tmp_path: Path) -> None:
    assert SGLANG.cells(tmp_path) == {} and compared(tmp_path) == []


def part(settings: Mapping[str, Any], step_ms: float) -> dict[str, Any]:
    defaults = {"model": "benchmarks/shapes/llama-3.1-8b/", "method": "EAGLE3", "narrower": []}
    numbers = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    row = {"batch": 8, "step_ms": step_ms, "num_tokens": 808, "wall_s": 2.5, "one_token_wall_s": 0.5}
    return {"settings": defaults | numbers | settings, "batches": [row]}


def throughput(when: str, step_ms: float, **settings: Any) -> dict[str, Any]:
    plain = part({"method": "NONE"}, step_ms / 2)
    return {"benchmark": "throughput", "run": {"when": when}, "engine": part(settings, step_ms), "plain": plain}


def traffic(when: str, *cells: Mapping[str, Any]) -> dict[str, Any]:
    return {"benchmark": "real_traffic", "run": {"when": when}, "cells": cells}


def test_our_figures_are_the_newest_of_each_cell() -> None:
    prompts = {"row": 15, "part": "8B 8", "prompts": 8}
    cells = own_cells(
        {
            "a": throughput("2026-01-01", 5.0),
            "b": throughput("2026-01-03", 4.0),
            "c": throughput("2026-01-02", 3.0),
            "adaptive": throughput("2026-01-04", 1.0, narrower=[1, 2]),
            "tree": throughput("2026-01-01", 6.0, num_steps=5, topk=8, num_draft_tokens=32),
            "old": traffic("2025-01-01", prompts | {"value": 30.0}),
            "new": traffic("2025-01-02", prompts | {"value": 20.0}),
            "other": {"benchmark": "attacks"},
        }
    )
    assert cells == {
        Cell(LLAMA, CHAIN, 8): Figure(4.0, 400.0, "b"),
        Cell(LLAMA, PLAIN, 8): Figure(0.5, 400.0, "adaptive"),
        Cell(LLAMA, "EAGLE-3 tree (5, 8, 32)", 8): Figure(6.0, 400.0, "tree"),
        Cell(LLAMA, FIRST, 8): Figure(20.0, 0.0, "new"),
    }


@pytest.mark.parametrize(("plain_s", "ms"), [(0.25, 250.0), (0.75, 500.0)])
def test_a_first_token_is_the_shorter_one_with_and_without_speculation(plain_s: float, ms: float) -> None:
    report, adaptive = throughput("2026-01-01", 5.0), throughput("2026-01-02", 5.0, narrower=[1, 2])
    for each in (report, adaptive):
        each["plain"]["batches"][0]["one_token_wall_s"] = plain_s
    assert own_cells({"a": report, "b": adaptive})[Cell(LLAMA, FIRST, 8)] == Figure(ms, 0.0, "a")
    assert Cell(LLAMA, FIRST, 8) not in own_cells({"b": adaptive}), "which no peer ran"


def record_of(results: Path, device: str, reports: Mapping[str, Any] | None = None, **others: str) -> None:
    """One part of a record, whole where there are no others."""
    file = {
        **{"part": "tables", "card": "h200", "digest": "d", "record": {"tables": "d"} | others},
        **{
            "run": {"device": device, "when": "2026-01-01"},
            "reports": reports or {"throughput_8b": throughput("2026-01-01", 2.0)},
        },
    }
    (results / "h200").mkdir(parents=True)
    (results / "h200/tables-d.json").write_text(json.dumps(file))


def test_once_there_is_a_record_our_figures_are_from_it_alone(tmp_path: Path) -> None:
    (tmp_path / "throughput_chain_h200.json").write_text(json.dumps(throughput("2026-01-02", 9.0)))
    assert list(own_reports(tmp_path)) == ["throughput_chain_h200.json"]
    record_of(tmp_path, "NVIDIA H200")
    assert own_cells(own_reports(tmp_path))[Cell(LLAMA, CHAIN, 8)] == Figure(2.0, 400.0, "tables, throughput_8b")


def test_before_a_record_is_whole_its_parts_stand_beside_files(tmp_path: Path) -> None:
    (tmp_path / "throughput_chain_h200.json").write_text(json.dumps(throughput("2025-01-02", 9.0)))
    record_of(tmp_path, "NVIDIA H200", tests="e")
    assert list(own_reports(tmp_path)) == ["throughput_chain_h200.json", "tables, throughput_8b"]
    assert own_cells(own_reports(tmp_path))[Cell(LLAMA, CHAIN, 8)].origin == "tables, throughput_8b"


def test_default_numbers_are_a_part_of_the_record(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks/results"
    assert record_table(results, DEFAULT_NUMBERS) == NOT_MEASURED
    engines = {
        name: {"settings": {"method": "EAGLE3", "num_steps": 3, "topk": 1, "num_draft_tokens": 4, "narrower": [1]},
               "batches": [{"batch": batch, "tokens_per_second": speed} for batch, speed in speeds.items()]}
        for name, speeds in (("engine", {1: 190.0, 256: 995.0}), ("plain", {1: 100.0, 256: 1000.0}))
    }  # fmt: skip
    about = {"device": "NVIDIA H200", "commit": "c" * 12, "versions": {}, "command": "x"}
    record_of(results, "NVIDIA H200", {"throughput_default_8b": {"benchmark": "throughput", "run": about} | engines})
    assert FIGURES["default-over-plain"](Results(tmp_path)) == "0.99 to 1.90"
    lines = record_table(results, DEFAULT_NUMBERS).splitlines()
    assert lines[0] == "| batch | overlap-spec, EAGLE3 (3, 1, 4), adaptive, tok/s | plain, tok/s | the first / plain |"
    assert lines[2] == "| 1 | 190 | 100 | 1.90 |" and lines[3] == "| 256 | 995 | 1,000 | **0.99** slower |"


def test_a_record_of_another_card_is_refused(tmp_path: Path) -> None:
    record_of(tmp_path, "NVIDIA H100 80GB HBM3")
    with pytest.raises(MixedCards):
        own_reports(tmp_path)


def row(cell: Cell, ours: float, *theirs: float | None) -> Row:
    return Row(cell, Figure(ours), tuple(None if ms is None else Figure(ms) for ms in theirs))


def test_what_is_behind_is_named() -> None:
    rows = [
        row(Cell(LLAMA, CHAIN, 64), 2.0, 2.0, None),
        row(Cell(LLAMA, CHAIN, 128), 2.0, 3.0, 1.9),
        row(Cell(LLAMA, CHAIN, 256), 2.0, 1.9, None),
        row(Cell(LLAMA, FIRST, 1, 8192), 200.0, None, 199.0),
    ]
    assert behind(rows, first=False) == "8B, EAGLE-3 (3, 1, 4) at batch 128, 256"
    assert behind(rows, first=True) == "8B, first token, 8,192 tokens"
    assert behind(rows[:1], first=False) == "none"
    assert times(rows, SGLANG, [LLAMA], first=False) == [1.0, 1.5, 0.95]
    assert times(rows, VLLM, [LLAMA], first=True) == [], "long prompts are not among the short ones"
    assert list(speeds([Row(CHAIN_32, Figure(1.0, 9.0), (Figure(1.0, 1234.5), None))], CHAIN_32)) == ["1,234", "", "9"]


CHAIN_32 = Cell(LLAMA, CHAIN, 32)
ASKED = (  # rows that no reader may lose, the ones that were lost to vLLM among them
    *(Cell(LLAMA, work, batch) for work in (PLAIN, CHAIN) for batch in (1, 8, 32, 64, 128, 256)),
    *(Cell(SMOLLM2, work, batch) for work in (PLAIN, CHAIN) for batch in (1, 8, 32, 64)),
    *(Cell(model, FIRST, batch) for model in (LLAMA, SMOLLM2) for batch in (1, 8, 32)),
    *(Cell(LLAMA, FIRST, 1, context) for context in (8192, 32768)),
    *(Cell(LLAMA, "EAGLE-3 tree (5, 8, 32)", batch) for batch in (1, 8, 32)),
)


def test_every_row_that_is_asked_for_is_compared() -> None:
    found = {each.cell: each for each in ROWS}
    assert set(ASKED) <= found.keys(), set(ASKED) - found.keys()
    assert all(found[cell].theirs[1] is not None for cell in ASKED if "tree" not in cell.work)


def test_the_table_marks_what_is_slower_and_names_every_file() -> None:
    text = peers_table(ROOT)
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == len(ROWS) and text.splitlines()[0].count("|") == len(HEAD) + 1
    for found, row in zip(lines, ROWS, strict=True):
        assert ("slower" in found) == row.is_behind, found
    letters = set(re.findall(r"\| (\w) \|$", text, re.MULTILINE))
    assert letters and all(f"\n- {letter}: " in text for letter in letters)


def test_readme_states_what_the_table_has() -> None:
    """Its sentences once had SGLang at 1.0 to 1.9 times our time where the table had it at 0.48 to 0.89."""
    readme = (ROOT / "README.md").read_text()
    for name, models, first in (
        ("steps-8b", [LLAMA], False),
        ("steps-smollm2", [SMOLLM2], False),
        ("prompts", [LLAMA, SMOLLM2], True),
    ):
        (stated,) = re.findall(rf"\*\*([^*]+)\*\*<!-- figure: {name} -->", readme)
        numbers = [float(number) for number in re.findall(r"[\d.]+", stated)]
        spans = [times(ROWS, peer, models, first) for peer in PEERS]
        assert numbers == pytest.approx([end for span in spans for end in (min(span), max(span))], abs=0.1)
        assert all(low <= min(span) for low, span in zip(numbers[::2], spans, strict=True))


def test_the_chart_shows_both_peers_and_where_we_are_behind() -> None:
    text = chart(ROOT)
    assert all(f">{peer.name}<" in text for peer in PEERS)
    batches = {(LLAMA, batch) for batch in (1, 32, 128, 256)} | {(SMOLLM2, batch) for batch in (1, 8, 32, 64)}
    shown = [
        row
        for row in ROWS
        if row.cell.work != FIRST and row.cell.context == 128 and (row.cell.model, row.cell.batch) in batches
    ]
    factors = re.findall(r">([\d.]+)x<", text)
    assert len(factors) == sum(figure is not None for row in shown for figure in row.theirs) > 20
    assert sum(float(factor) < 1 for factor in factors) == text.count('fill="#b03030"')


def measure() -> Any:
    """The script, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("measure_vllm", MEASURE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["measure_vllm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeEngine:
    """10 ms for a prefill, 2 ms for a step, which commits two tokens to each request. Its clock is the engine's."""

    def __init__(self) -> None:
        self.now, self.counted = 0.0, {"steps": 0.0, "drafts": 0.0, "accepted": 0.0}
        self.asked: list[tuple[int, int, int]] = []

    def answer(self, prompts: Sequence[list[int]], num_tokens: int) -> int:
        steps, batch = (num_tokens - 1) // 2, len(prompts)
        self.asked.append((batch, len(prompts[0]), num_tokens))
        self.now += 0.010 + 0.002 * steps
        more = {"steps": 1 + steps, "drafts": steps * batch, "accepted": steps * batch}
        self.counted = {name: self.counted[name] + more[name] for name in more}
        return num_tokens * batch

    def counters(self) -> Mapping[str, float]:
        return dict(self.counted)

    def clock(self) -> float:
        return self.now


def test_lines_of_our_script_are_read_as_they_were_measured() -> None:
    script, engine = measure(), FakeEngine()
    case = script.Case("8b-eagle3", (1, 8), "8k", length=8192, tokens=129)
    lines = list(script.Measurement(engine, case, script.random_prompts(8192), engine.clock).lines())
    assert engine.asked[:8] == [(1, 8192, 24)] * 2 + [(1, 8192, 1)] * 3 + [(1, 8192, 129)] * 2 + [(8, 8192, 24)]
    assert [(each["run"], each["engine_steps"], each["accept_len"]) for each in lines] == [("8k", 65, 2.0)] * 2
    assert VLLM.read(lines) == {
        Cell(LLAMA, CHAIN, 1, 8192): Figure(2.0, 1000.0, "8b-eagle3"),
        Cell(LLAMA, CHAIN, 8, 8192): Figure(2.0, 8000.0, "8b-eagle3"),
        **{Cell(LLAMA, FIRST, batch, 8192): Figure(10.0, 0.0, "8b-eagle3") for batch in (1, 8)},
    }


def test_our_script_asks_for_what_the_lines_were_measured_with() -> None:
    """All arguments but paths and graph sizes, which that script chose by hand."""
    script = measure()
    texts = [text for file in (ROOT / VLLM.folder).glob("*.jsonl") for text in file.read_text().splitlines()]
    infos = [each for each in map(json.loads, texts) if each["kind"] == "info" and each["config"] in VLLM.configs]
    measured = {
        f"{each.get('run', '')}-{each['config']}".removeprefix("-vllm-").removeprefix("-"): each for each in infos
    }
    measured = {name.removeprefix("vllm-"): each["args"] for name, each in measured.items()}
    assert measured.keys() == {case.name for case in script.CASES}
    for case in script.CASES:
        ours, theirs = case.arguments(Path("/models")), measured[case.name]
        for arguments in (ours, theirs):
            del arguments["model"], arguments["compilation_config"]
            arguments.get("speculative_config", {}).pop("model", None)
        assert ours == theirs, case.name


def test_a_head_is_what_vllm_reads() -> None:
    script = measure()
    assert script.head_for_vllm({"a": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14]}}) == {
        **{"a": 1, "eagle_aux_hidden_state_layer_ids": [2, 15]}
    }
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 4}
    weights = script.random_head(sizes | {"draft_vocab_size": 5, "vocab_size": 20})
    tokens = weights["d2t"] + weights["d2t"].new_tensor(range(5))
    assert weights["t2d"].nonzero().flatten().tolist() == tokens.tolist() and weights["lm_head.weight"].shape == (5, 8)
    assert weights["midlayer.self_attn.k_proj.weight"].shape == (4, 16)


def test_without_vllm_the_script_refuses(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(MEASURE), "--output", str(tmp_path / "lines")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "vLLM is not installed" in done.stderr and "vllm==0.25.1" in done.stderr
    assert not list(tmp_path.iterdir())
