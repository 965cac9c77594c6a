"""What a start measures is kept for the next one, which looks on a GPU whether it still holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from overlap_spec.config import EngineConfig, Machine, ModelFiles, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.messages import PrefillCosts, StepCosts
from overlap_spec.metrics.step_floor import Ceiling
from overlap_spec.runtime import measured as measured_module
from overlap_spec.worker.sizing import start_costs as module
from overlap_spec.worker.sizing.geometry import Geometry
from overlap_spec.worker.sizing.start_costs import start_costs
from overlap_spec.worker.sizing.step_times import ChunkSize

FILES = ModelFiles(
    weights="/nowhere",
    config={"architectures": ["LlamaForCausalLM"], "hidden_size": 8},
    tokenizer_dir=None,
    eos_token_ids=(2,),
    context_length=64,
    vocab_size=32,
)
GEOMETRY = Geometry(4, 1, 16, 64, 100, 48, torch.float32)
PREFILL = PrefillCosts(0.5, 0.25, 0.125)
STEPS = StepCosts((1, 4), (1, 2), ((0.5, 0.25), (1.0, 2.0)))
EXECUTOR: Any = None


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order."""
    done: list[str] = []

    def measuring(what: str, result: object) -> None:
        monkeypatch.setattr(module, what, lambda *_: (done.append(what), result)[1])

    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_module, "seconds_of_others", lambda: 0.0)  # as on a quiet machine
    measuring("measure_chunk", ChunkSize(48, 7, PREFILL))
    measuring("measure_prefill", PREFILL)
    measuring("measure_steps", STEPS)
    measuring("ceiling_of", Ceiling(3.0, 4.0))
    monkeypatch.setattr(module, "_device_and_compilers", lambda: ("a GPU",))
    monkeypatch.setattr(module, "measured_again", lambda *_: 1.0)
    return done


def settings(**flags: Any) -> Settings:
    found = resolve(EngineConfig(device="cpu", skip_tokenizer_init=True, **flags), FILES, Machine(2, False))[0]
    return replace(found, scheduler=replace(found.scheduler, keeps_width=False))


def on_a_gpu(settings: Settings) -> Settings:
    return replace(settings, model=replace(settings.model, device="cuda"))


ALL = ["measure_chunk", "measure_steps", "ceiling_of"]


def test_the_second_start_measures_nothing_and_says_the_same(measured: list[str]) -> None:
    first, second = (start_costs(settings(), EXECUTOR, GEOMETRY) for _ in range(2))
    assert first == second
    assert (first.chunk, first.steps, first.ceiling) == (ChunkSize(48, 7, PREFILL), STEPS, Ceiling(3.0, 4.0))
    assert measured == ALL


@pytest.mark.parametrize(
    "other",
    [
        replace(settings(), num_threads=1),
        settings(dtype="float64"),
        settings(max_running_requests=3),
        settings(page_size=4),
        replace(settings(), spec=replace(settings().spec, width=2)),
    ],
)
def test_other_settings_are_measured_themselves(other: Settings, measured: list[str]) -> None:
    start_costs(settings(), EXECUTOR, GEOMETRY)
    start_costs(other, EXECUTOR, GEOMETRY)
    assert measured == ALL * 2


def test_a_damaged_file_is_measured_again(tmp_path: Path, measured: list[str]) -> None:
    start_costs(settings(), EXECUTOR, GEOMETRY)
    (path,) = (tmp_path / "measured").iterdir()
    path.write_text('{"chunk": 3}')
    assert start_costs(settings(), EXECUTOR, GEOMETRY).steps == STEPS
    assert measured == ALL * 2


@pytest.mark.parametrize(("ratio", "times"), [(1.1, 1), (1.2, 2)])
def test_a_gpu_measures_again_what_has_changed(
    ratio: float, times: int, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measured_again", lambda *_: ratio)
    for _ in range(2):
        assert start_costs(on_a_gpu(settings()), EXECUTOR, GEOMETRY).chunk == ChunkSize(GEOMETRY.max_chunk, 0)
    assert measured == ["measure_steps", "ceiling_of"] * times


def test_what_a_gpu_takes_is_kept_on_a_busy_machine_too(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_module, "seconds_of_others", iter(range(0, 1000, 100)).__next__)
    for _ in range(2):
        start_costs(on_a_gpu(settings()), EXECUTOR, GEOMETRY)
    assert measured == ["measure_steps", "ceiling_of"]
    for _ in range(2):
        start_costs(settings(), EXECUTOR, GEOMETRY)
    assert measured[2:] == ALL * 2


@pytest.mark.parametrize("other", [("another GPU",), ("a GPU", "other kernels")])
def test_another_gpu_and_other_kernels_are_measured_themselves(
    other: tuple[str, ...], measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_costs(on_a_gpu(settings()), EXECUTOR, GEOMETRY)
    monkeypatch.setattr(module, "_device_and_compilers", lambda: other)
    start_costs(on_a_gpu(settings()), EXECUTOR, GEOMETRY)
    assert measured == ["measure_steps", "ceiling_of"] * 2


def test_a_chunk_size_that_was_given_stays_and_its_costs_are_measured(measured: list[str]) -> None:
    given = start_costs(settings(chunked_prefill_size=32), EXECUTOR, GEOMETRY)
    assert given.chunk == ChunkSize(GEOMETRY.max_chunk, 0, PREFILL)
    assert measured == ALL


def test_nothing_is_measured_for_prompts_that_are_never_cut(measured: list[str]) -> None:
    whole = start_costs(settings(chunked_prefill_size=-1), EXECUTOR, GEOMETRY)
    assert whole.chunk == ChunkSize(GEOMETRY.max_chunk, 0)
    assert measured == ["measure_steps", "ceiling_of"]


def test_prompts_are_timed_where_a_chunk_is_sized_by_its_time(measured: list[str]) -> None:
    sized = settings(max_gap_ms=40)
    assert start_costs(on_a_gpu(sized), EXECUTOR, GEOMETRY).chunk == ChunkSize(GEOMETRY.max_chunk, 0, PREFILL)
    assert measured == ["measure_prefill", "measure_steps", "ceiling_of"]
    both = start_costs(settings(max_gap_ms=40, chunked_prefill_size=32), EXECUTOR, GEOMETRY)
    assert both.chunk == ChunkSize(GEOMETRY.max_chunk, 0, PREFILL)
    assert measured[3:] == ALL


def test_step_costs_that_are_not_needed_are_not_measured(measured: list[str]) -> None:
    kept = replace(settings(), scheduler=replace(settings().scheduler, keeps_width=True))
    assert start_costs(kept, EXECUTOR, GEOMETRY).steps == StepCosts()
    assert measured == ["measure_chunk", "ceiling_of"]
