"""Records, loads and tables of `bench methods`, without an engine; the chart of a report."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents.result_tables import render

from overlap_spec.bench.methods import Session, add_entry, bounded, groups_of, jobs_of, repeated, share_identical
from overlap_spec.bench.methods_records import (
    PLAIN_RECORD,
    Drafts,
    MethodRecord,
    Skipped,
    check_record,
    chosen,
    config_of,
    in_force,
    read_method_records,
)
from overlap_spec.bench.workload import Workload, load_prompts
from overlap_spec.config import EngineConfig
from overlap_spec.config.speculation import METHOD_FACTS
from overlap_spec.entrypoints.cli.bench import _print
from overlap_spec.errors import ConfigError, OverlapSpecError

SCRIPT = Path(__file__).parents[3] / "benchmarks/methods_chart.py"
CONFIG = EngineConfig(skip_tokenizer_init=True, max_running_requests=4, speculative_num_steps=7)
NO_DRAFTS = Drafts({})


def figures(prompts: str, batch: int, ratio: float, identical: float = 1.0) -> dict[str, Any]:
    return {
        "prompts": prompts, "batch": batch, "accept_length": 2.5, "step_ms": 1.5, "tokens_per_second": 100 * ratio,
        "ratio": ratio, "identical": identical,
    }  # fmt: skip


def entry(label: str, status: str = "ran", **more: Any) -> dict[str, Any]:
    flags = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4} if label != "plain" else {}
    return {"label": label, "status": status, "load_average": 3.5, "flags": dict.fromkeys(CHAIN) | flags} | more


CHAIN = ("num_steps", "topk", "num_draft_tokens")
MEMORY = {"weights_mib": 275, "draft_weights_mib": 18, "kv_bytes_per_token": 1200, "draft_kv_bytes_per_token": 200}
PLAIN_MEMORY = {"weights_mib": 257, "draft_weights_mib": 0, "kv_bytes_per_token": 1000, "draft_kv_bytes_per_token": 0}
CELLS = [("chat20", 1), ("chat20", 8), ("copy20", 1), ("copy20", 8)]
REPORT: dict[str, Any] = {
    "benchmark": "methods",
    "run": {
        "device": "NVIDIA H200",
        "num_threads": 2,
        "commit": "abc",
        "versions": {"torch": "2.11"},
        "command": "bench",
    },  # fmt: skip
    "workload": {"prompts": "chat20,copy20", "batch_sizes": [1, 8], "num_prompts": {"chat20": 4, "copy20": 3}},
    "methods": [
        entry(
            "plain",
            memory=PLAIN_MEMORY,
            settings={"model": "smollm2"},
            figures=[figures(name, batch, 1.0) for name, batch in CELLS],
        ),
        entry(
            "chain",
            memory=MEMORY,
            figures=[
                figures(name, batch, ratio, 0.95 if batch == 8 else 1.0)
                for (name, batch), ratio in zip(CELLS, (1.5, 0.83, 1.75, 1.0), strict=True)
            ],
        ),
        entry("tree", "refused", reason="--speculative-eagle-topk: no trees today"),
        entry("broken", "failed", reason="it broke", memory=MEMORY, figures=[figures("chat20", 1, 1.25)]),
    ],
}


def row_of(table: str, start: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_shipped_table_names_methods_that_exist_or_will() -> None:
    records = read_method_records(None)
    named = {record.algorithm for record in records}
    assert set(METHOD_FACTS) - {PLAIN_RECORD.algorithm} <= named  # a new method needs a row here
    for record in records:
        numbers = (record.num_steps, record.topk, record.num_draft_tokens)
        assert None not in numbers or set(numbers) == {None}, record
        assert record.topk != 1 or record.num_draft_tokens == (record.num_steps or 0) + 1, record


def test_a_record_replaces_every_flag_of_speculation() -> None:
    record = MethodRecord("x", "EAGLE", 3, 1, 4, token_map=True, adaptive=True)
    config = config_of(CONFIG, record, Drafts({"EAGLE": "head", "EAGLE3": "other"}, "map.pt"))
    assert (config.speculative_algorithm, config.speculative_draft_model_path) == ("EAGLE", "head")
    assert config.speculative_num_steps == 3 and config.speculative_adaptive
    assert config.speculative_token_map == "map.pt" and config.max_running_requests == 4
    plain = config_of(CONFIG, PLAIN_RECORD, NO_DRAFTS)
    assert plain.speculative_algorithm == "NONE" and plain.speculative_num_steps is None


def test_what_was_not_given_is_skipped_and_what_cannot_be_is_refused() -> None:
    with pytest.raises(Skipped, match="--token-map FILE"):
        config_of(CONFIG, MethodRecord("x", "EAGLE", 3, 1, 4, token_map=True), NO_DRAFTS)
    with pytest.raises(ConfigError, match="--speculative-num-steps: must be a whole number at least 1"):
        config_of(CONFIG, MethodRecord("x", "EAGLE", 0, 1, 4), NO_DRAFTS)
    record = MethodRecord("x", "STANDALONE", 3, 1, 4)
    with pytest.raises(Skipped, match="needs --draft STANDALONE=PATH"):
        check_record(config_of(CONFIG, record, NO_DRAFTS), record, NO_DRAFTS)
    half = MethodRecord("x", "EAGLE3", 3)
    with pytest.raises(ConfigError, match="together"):
        check_record(config_of(CONFIG, half, NO_DRAFTS), half, NO_DRAFTS)


def test_numbers_that_are_not_given_are_those_in_force() -> None:
    record = MethodRecord("x", "EAGLE3")
    settings = check_record(config_of(CONFIG, record, NO_DRAFTS), record, NO_DRAFTS)
    assert in_force(record, settings) == MethodRecord("x", "EAGLE3", 3, 1, 4)


def test_rows_are_chosen_by_algorithm_and_a_draft_without_a_row_is_refused() -> None:
    records = read_method_records(None)
    assert chosen(records, [], NO_DRAFTS) == records
    assert {record.algorithm for record in chosen(records, ["EAGLE"], NO_DRAFTS)} == {"EAGLE"}
    for only, drafts, flag in (
        (["ORACLE"], NO_DRAFTS, "--only"),
        (["EAGLE"], Drafts({"STANDALONE": "x"}), "--draft"),
        (["STANDALONE"], Drafts({}, "map.pt"), "--token-map"),
    ):
        with pytest.raises(ConfigError, match=flag):
            chosen(records, only, drafts)


def test_a_method_that_learns_has_an_engine_for_every_batch_size() -> None:
    workload = Workload("a,b", batch_sizes=(8, 1, 8))
    session = Session(workload, 3, {"a": [[1]], "b": [[2]]})
    plain, chain, *learning = jobs_of([MethodRecord("x", "EAGLE3"), MethodRecord("y", "EAGLE", learns=True)], session)
    every = (("a", 1), ("a", 8), ("b", 1), ("b", 8))
    assert plain.record == PLAIN_RECORD and plain.cells == chain.cells == every
    assert plain.num_runs == chain.num_runs == 3
    assert [job.cells for job in learning] == [(("a", 1), ("b", 1)), (("a", 8), ("b", 8))]
    assert {job.num_runs for job in learning} == {1}


def test_engines_that_time_their_steps_start_alone() -> None:
    adaptive, automatic = MethodRecord("s", "EAGLE3", 3, 1, 4, adaptive=True), MethodRecord("t", "EAGLE3")
    fixed = [MethodRecord(label, "EAGLE", 3, 1, 4) for label in "uvwxy"]
    jobs = jobs_of([*fixed[:1], adaptive, *fixed[1:], automatic], Session(Workload("a"), 1, {"a": [[1]]}))
    labels = [[job.record.label for job in group] for group in groups_of(jobs, 3)]
    assert labels == [["plain", "u"], ["s"], ["v", "w", "x"], ["y"], ["t"]]


def test_entries_of_one_method_become_one() -> None:
    found: list[dict[str, Any]] = []
    add_entry(found, entry("chain", figures=[1]))
    add_entry(found, entry("chain", figures=[2]))
    add_entry(found, entry("chain", "failed", reason="it broke"))
    add_entry(found, entry("tree", "refused", reason="no"))
    add_entry(found, entry("tree", "refused", reason="no"))
    assert [(kept["label"], kept["status"], kept.get("figures")) for kept in found] == [
        ("chain", "failed", [1, 2]),
        ("tree", "refused", None),
    ]
    with pytest.raises(OverlapSpecError, match="plain decoding does not run.*no memory"):
        add_entry([], entry("plain", "failed", reason="no memory"))


def test_sizes_that_were_not_given_are_those_of_the_largest_load() -> None:
    session = Session(Workload("a", num_tokens=50, batch_sizes=(1, 8)), 1, {"a": [[0] * 100, [0] * 10]})
    small = bounded(EngineConfig(), session)
    assert (small.max_running_requests, small.context_length) == (8, 406)
    assert small.max_total_tokens == 8 * 406 and small.skip_tokenizer_init and small.disable_radix_cache
    assert small.audit_rate == 0 and bounded(EngineConfig(audit_rate=0.5), session).audit_rate == 0.5
    given = EngineConfig(max_running_requests=2, max_total_tokens=999, context_length=512)
    kept = bounded(given, session)
    assert (kept.max_running_requests, kept.max_total_tokens, kept.context_length) == (2, 999, 512)


@pytest.mark.parametrize("content", ["{", '[{"label": "x"}]', '[{"label": "plain", "algorithm": "EAGLE"}]'])
def test_a_table_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(ConfigError, match="--methods: "):
        read_method_records(str(tmp_path / "table.json"))


def test_prompts_with_text_to_copy_ship() -> None:
    texts = load_prompts("copy20")
    assert len(set(texts)) == 20 and min(map(len, texts)) > 300
    for text in texts:
        task, _, given = text.partition("\n\n")
        assert task and len(given) > 2 * len(task)


def test_prompts_are_sent_again_only_where_a_batch_needs_more() -> None:
    prompts = [[1], [2], [3]]
    assert list(repeated(prompts, 2)) == prompts
    assert list(repeated(prompts, 5)) == [[1], [2], [3], [1], [2]]
    assert share_identical([[1], [2], [3], [1], [9]], prompts) == 0.8


def test_the_whole_table_marks_what_is_slower() -> None:
    table = render(REPORT)
    assert row_of(table, "plain | copy20 | 8")[3:] == ["2.5", "1.5", "100", "1.00", "100%", "257", "1000"]
    slower = row_of(table, "chain (3, 1, 4) | chat20 | 8")
    assert slower[3:] == ["2.5", "1.5", "83", "**0.83** slower", "95%", "257 + 18", "1000 + 200"]
    assert "- tree (3, 1, 4): refused: --speculative-eagle-topk: no trees today" in table.splitlines()


def test_rows_are_in_one_order_whatever_the_order_of_the_runs() -> None:
    learner = entry("chain", memory=MEMORY, figures=[figures(*CELLS[index], 1.0) for index in (0, 2, 1, 3)])
    table = render(REPORT | {"methods": [learner]}).splitlines()
    assert [tuple(line.split(" | ")[1:3]) for line in table[2:6]] == [(name, str(batch)) for name, batch in CELLS]


def test_the_summary_has_a_column_for_every_batch_size() -> None:
    table = render(REPORT, "methods_summary")
    heads = [f"{name}: {column}" for name in ("chat20", "copy20") for column in ("accept length", "batch 1", "batch 8")]
    assert table.startswith(f"| method | {' | '.join(heads)} | same answers |")
    chain = ["2.5", "1.50", "**0.83** slower", "2.5", "1.75", "1.00", "95%"]
    assert row_of(table, "chain (3, 1, 4)")[1:8] == chain
    assert row_of(table, "broken (3, 1, 4)")[1:8] == ["2.5", "1.25", "", "", "", "", "100%"]
    assert "- broken (3, 1, 4): failed: it broke" in table.splitlines()


def test_a_speed_that_is_left_out_is_in_neither_table_nor_chart(chart: ModuleType) -> None:
    """Its answers count, as does the same cell of other methods and prompts."""
    report = REPORT | {"left_out": [["chain", "chat20", 8]], "note": "-: why"}
    table = render(report, "methods_summary")
    assert row_of(table, "chain (3, 1, 4)")[1:8] == ["2.5", "1.50", "-", "2.5", "1.75", "1.00", "95%"]
    assert row_of(table, "plain")[3] == "1.00" and table.endswith("`bench`; -: why")
    chats, copies = chart.panels(report)
    assert chats.ratios == {1: [1.5, 1.25], 8: [None, None]} and copies.ratios[8] == [1.0, None]


def test_the_printed_table_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    _print(REPORT)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80, "a heading or a figure is cut in a small terminal"
    assert printed.count("tok/s") == printed.count("accept") == 1, "the columns of all methods have one heading"
    assert "0.83 slower" in printed and "tree (3, 1, 4): refused: --speculative-eagle-topk" in printed


def test_a_busy_machine_is_said_below_the_table() -> None:
    assert "others used" not in render(REPORT)
    busy = [REPORT["methods"][0] | {"load_average": 4.5}, *REPORT["methods"][1:]]
    assert "- others used this machine meanwhile (load average 4.5, 2 threads)" in render(REPORT | {"methods": busy})


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("methods_chart", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_has_a_panel_for_each_set_of_prompts(chart: ModuleType) -> None:
    chats, copies = chart.panels(REPORT)
    assert (chats.title, copies.title) == ("4 chats", "3 prompts with text to copy")
    assert chats.methods == copies.methods == ["chain (3, 1, 4)", "broken (3, 1, 4)"]
    assert chats.ratios == {1: [1.5, 1.25], 8: [0.83, None]}
    assert copies.ratios == {1: [1.75, None], 8: [1.0, None]}


def test_a_chart_has_two_decimals_and_no_indentation(chart: ModuleType) -> None:
    assert chart.shortened('<g>\n   <path d="M 164.78125 0.8\n  L 9.999 1"/> \n</g>') == (
        '<g>\n<path d="M 164.78 0.8\nL 10.00 1"/>\n</g>\n'
    )


def test_the_chart_is_the_same_for_the_same_report(chart: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="draws with matplotlib, which only charts need: pip install --group charts"
    )
    for name in ("a.svg", "b.svg"):
        chart.draw(json.loads(json.dumps(REPORT)), tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert "0.83" in drawn and "chain (3, 1, 4)" in drawn and "commit abc" in drawn
