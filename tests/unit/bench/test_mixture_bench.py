"""benchmarks/mixtures.py: which experts rows have and how many are expected; floors; that every row is measured."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mixtures
import pytest
import torch
from mixture_routers import SHARED, STEPS, UNIFORM, ZIPF, InjectedChoice, Routers, expected_distinct, experts_of
from overlap_spec_kernels.experts.route import router_logits_reference
from overlap_spec_kernels.launch import assuming
from records.parts import MIXTURE_ROWS, PARTS

from overlap_spec.config import EngineConfig, Machine
from overlap_spec.hub import resolve_model
from overlap_spec.models.loading.loader import load_target

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [UNIFORM, ZIPF, SHARED])
def test_experts_of_a_row_are_distinct(kind: str) -> None:
    found = experts_of(kind, 50, 4, 16, 6)
    assert found.shape == (200, 6) and found.min() >= 0 and found.max() < 16
    assert all(len(row.unique()) == 6 for row in found)


def test_rows_of_a_request_share_half() -> None:
    by_request = experts_of(SHARED, 300, 4, 64, 8).view(300, 4, 8)
    assert torch.equal(by_request[:, :, :4], by_request[:, :1, :4].expand(-1, 4, -1))
    others = [len(own.unique()) for own in by_request[:, :, 4:]]
    assert 13 < sum(others) / len(others) <= 16


def test_the_first_expert_of_zipf_is_the_most_frequent() -> None:
    counts = experts_of(ZIPF, 4000, 1, 16, 2).flatten().bincount(minlength=16)
    assert counts.argmax() == 0 and counts[0] > 3 * counts[7] > 0


def test_expectations() -> None:
    """Those of the uniform router for 8 of 128 experts, and what is counted."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128)
    expected = [round(expected_distinct(UNIFORM, count, 1, 128, 8), 1) for count in rows]
    assert expected == [8, 15.5, 29.1, 51.6, 82.4, 111.8, 125.9, 128]
    for kind, requests, width in ((UNIFORM, 3, 2), (SHARED, 2, 4), (ZIPF, 5, 1)):
        drawn = experts_of(kind, 2000 * requests, width, 32, 4).view(2000, -1)
        counted = sum(len(step.unique()) for step in drawn) / 2000
        assert counted == pytest.approx(expected_distinct(kind, requests, width, 32, 4), rel=0.02)


def test_a_choice_takes_the_drawn_experts_and_steps_go_on() -> None:
    routers = Routers(2, 16, 4, 6, CPU)
    first, last = routers.choices
    x, weight = torch.randn(6, 32), torch.randn(16, 32)
    for step in (0, 1):
        for choice in (first, last):
            routing = choice(x, weight)
            drawn = choice.table[step]
            assert torch.equal(routing.experts.sort(1).values, drawn.sort(1).values.long())
            logits = router_logits_reference(x, weight).gather(1, routing.experts)
            torch.testing.assert_close(routing.weights, logits.softmax(1), atol=1e-3, rtol=0)
            assert (logits.diff(dim=1) <= 1e-3).all(), "float32 holds 1,000 to within 1e-4"
    assert routers.counted(6) == [len(choice.table[1].unique()) for choice in (first, last)]
    many = first(torch.randn(15, 32), weight).experts
    assert torch.equal(many[6:12].sort(1).values, first.table[3].sort(1).values.long())


def test_steps_come_again() -> None:
    table, last = torch.arange(STEPS, dtype=torch.int32).view(-1, 1, 1), torch.zeros(1, 1, dtype=torch.int64)
    choice = InjectedChoice(1, table, torch.tensor([2 * STEPS + 5]), last, True)
    assert choice(torch.randn(1, 8), torch.randn(STEPS, 8)).experts.tolist() == [[5]]


@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize(
    ("name", "dense", "floor_ms"),
    [
        ("qwen3-30b-a3b", 0, 1.44),
        ("qwen3-30b-a3b-fp8", 0, 0.80),
        ("qwen3-30b-a3b-int4", 0, 0.49),
        ("gpt-oss-20b", 0, 0.88),
        ("glm-4.7-flash", 1, 1.69),
    ],
)
def test_floors_of_one_row(name: str, dense: int, floor_ms: float, tmp_path: Path) -> None:
    """Active weights in the types that they are stored in, as a GPU loads them: of 2 layers, taken for all. The first
    `dense` layers have no experts, and as many bytes, within 1%.
    """
    config = json.loads((ROOT / f"benchmarks/shapes/{name}/config.json").read_text())
    num_layers = config["num_hidden_layers"]
    small = {"num_hidden_layers": 2} | ({"first_k_dense_replace": 0} if dense else {})
    (tmp_path / "config.json").write_text(json.dumps(config | small))
    files = resolve_model(EngineConfig(model_path=str(tmp_path), load_format="dummy", skip_tokenizer_init=True))
    with assuming((9, 0)):
        target = load_target(files, torch.bfloat16, torch.device("meta"))
    head = target.work.head_flop // 2 * 2  # bytes: 16 bits for each weight
    moved = head + (target.work.weight_bytes - head) / 2 * num_layers
    assert 1000 * moved / mixtures.CEILING.bytes_per_s == pytest.approx(floor_ms, abs=0.01)


def test_a_time_beside_its_floor() -> None:
    row = mixtures.figures(0.002, 0.0016, 48)
    assert row == {"ms": 2.0, "floor_ms": 1.6, "over_floor": 1.25, "us_a_layer_over_floor": 8.33}
    assert mixtures.is_near({"distinct": 29.8, "expected_distinct": 29.1})
    assert not mixtures.is_near({"distinct": 30.1, "expected_distinct": 29.1})


@pytest.mark.parametrize("setup", mixtures.SETUPS + mixtures.OTHERS, ids=lambda setup: setup.name)
def test_pages_of_all_slots_fit(setup: mixtures.Setup) -> None:
    config, longest = mixtures.config_of(setup, Machine(8, has_cuda=True)), max(setup.contexts)
    assert config.max_total_tokens is not None and config.max_total_tokens >= setup.num_tokens
    assert config.context_length is not None and config.context_length >= longest + mixtures.MOST_AFTER
    after = (mixtures.ROUNDS + 1) * mixtures.STEPS * 4 + 4 * mixtures.COUNTED
    assert longest + after <= mixtures.PAGE * mixtures.pages_of(longest)


def test_the_part_has_every_row() -> None:
    assert sum(setup.num_rows for setup in mixtures.SETUPS) + 1 == MIXTURE_ROWS
    (part,) = (part for part in PARTS if part.name == "mixtures")
    assert part.seconds <= 540 and len(part.commands) == 2
    others = sum(setup.num_rows for setup in mixtures.OTHERS)
    assert [part.commands[1].whole({"rows": [{}] * count}) for count in (others - 1, others)] == [False, True]


def test_rows_of_the_same_code_and_device_are_kept(tmp_path: Path) -> None:
    output, run = tmp_path / "report.json", {"device": "x", "commit": "1", "source": {"code": {}}}
    assert mixtures.rows_before(str(output), run) == [] == mixtures.rows_before(None, run)
    output.write_text(json.dumps({"run": run, "rows": [{"setup": "bf16"}]}))
    assert mixtures.rows_before(str(output), run) == [{"setup": "bf16"}]
    for other in ({"device": "y"}, {"commit": "2"}, {"source": {"code": {"a": "b"}}}):
        assert mixtures.rows_before(str(output), run | other) == []


def test_rows_that_are_done_are_not_measured_again() -> None:
    """Of the same engine the others are."""
    measured: list[tuple[int | str, ...]] = []
    bench = SimpleNamespace(
        setup=mixtures.Setup("x", {}, ((1, (UNIFORM,)), (8, (UNIFORM, ZIPF))), (64, 128)),
        routers=SimpleNamespace(draw=lambda kind, width: None),
        decode=lambda *load: measured.append(load),
        prefill=lambda *load: measured.append(load),
    )
    rows = [{"batch": 8, "routers": UNIFORM, "context": mixtures.CONTEXT}, {"prompt": 64}]
    # a bench of what rows call
    list(mixtures.Bench.rows(bench, {mixtures.load_of(row) for row in rows}))  # type: ignore[arg-type]
    assert measured == [(1, UNIFORM, mixtures.CONTEXT), (8, ZIPF, mixtures.CONTEXT), (128,)]


@pytest.mark.full
def test_it_runs_with_a_tiny_shape(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/mixtures.py", "--tiny", "--output", str(output)]
    for others in ([], ["--others"]):
        subprocess.run([*command, *others], cwd=ROOT, check=False, timeout=250)
    rows = json.loads(output.read_text())["rows"]
    engines = {setup.name for setup in mixtures.SETUPS + mixtures.OTHERS}
    assert {row["setup"] for row in rows} == engines | {"grouped"}
    assert all(row["floor_ms"] >= 0 and row.get("ms", 1) > 0 for row in rows)
    for row in rows:
        if "distinct" in row:
            assert row["distinct"] == pytest.approx(row["expected_distinct"], rel=0.1)
