"""What a start measures is kept for the next one, which looks on a GPU whether it still holds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import fields, replace

from overlap_spec import features
from overlap_spec.config import CacheSettings, EngineConfig, Machine, ModelFiles, ModelSettings, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.messages import PrefillCosts, StepCosts
from overlap_spec.metrics.step_floor import Ceiling
from overlap_spec.runtime import measured as measured_module
from overlap_spec.worker.startup import start_costs as module
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.startup.start_costs import start_costs
from overlap_spec.worker.startup.step_times import ChunkSize

FILES = ModelFiles(
    weights="/nowhere",
    config={"architectures": ["LlamaForCausalLM"], "hidden_size": 8},
    tokenizer_dir=None,
    eos_token_ids=(2,),
    context_length=64,
    vocab_size=32,
)
GEOMETRY = Geometry(4, 2, 16, 64, 100, 48, torch.float32, narrower=(1,))
PREFILL = PrefillCosts(0.5, 0.25, 0.125)
STEPS = StepCosts((1, 4), (1, 2), ((0.5, 0.25), (1.0, 2.0)))
EXECUTOR: Any = None
DEVICE_AND_COMPILERS = module._device_and_compilers


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
    monkeypatch.setattr(module, "again", lambda *_: [(1, 1, 1.0), (4, 2, 1.0)])
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
        replace(settings(), spec=replace(settings().spec, draft_quantization="fp8")),
        replace(settings(), cache=replace(settings().cache, kv_dtype="float8_e4m3fn")),
        replace(settings(), model=replace(settings().model, files=replace(FILES, quantization="fp8"))),
        replace(settings(), logit_processor="a:b"),
        replace(settings(), features=("json",)),
    ],
)
def test_other_settings_are_measured_themselves(other: Settings, measured: list[str]) -> None:
    start_costs(settings(), EXECUTOR, GEOMETRY)
    start_costs(other, EXECUTOR, GEOMETRY)
    assert measured == ALL * 2


def test_other_synthetic_acceptances_are_not_measured_themselves_but_another_number_of_them_is(
    measured: list[str],
) -> None:
    for means in ((2.5,), (1.3,), (3.5, 1.3), (2.5, 1.0), ()):
        start_costs(replace(settings(), spec=replace(settings().spec, simulated_accept_lens=means)), EXECUTOR, GEOMETRY)
    assert measured == ALL * 3


def test_other_steps_of_features_are_measured_themselves(measured: list[str]) -> None:
    placed = dataclasses.replace(GEOMETRY, placed_slots=2, placed_batches=(1, 2))
    for geometry in (GEOMETRY, placed, dataclasses.replace(placed, placed_batches=(2,)), placed):
        start_costs(settings(), EXECUTOR, geometry)
    assert measured == ALL * 3


def test_a_damaged_file_is_measured_again(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    start_costs(settings(), EXECUTOR, GEOMETRY)
    (path,) = (tmp_path / "measured").iterdir()
    path.write_text('{"chunk": 3}')
    assert start_costs(settings(), EXECUTOR, GEOMETRY).steps == STEPS
    assert measured == ALL * 2 and f"{path} is ignored" in caplog.text


@pytest.mark.parametrize(("ratio", "times"), [(1.1, 1), (1.2, 2), (0.9, 1), (0.8, 2)])
def test_a_gpu_measures_again_what_has_changed(
    ratio: float, times: int, measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "again", lambda *_: [(1, 1, 1.0), (4, 2, ratio)])
    for _ in range(2):
        assert start_costs(on_a_gpu(settings()), EXECUTOR, GEOMETRY).chunk == ChunkSize(GEOMETRY.max_chunk, 0)
    assert measured == ["measure_steps", "ceiling_of"] * times
    assert (f"4 requests and width 2 takes {ratio:.2f} times" in caplog.text) == (times == 2)


def test_a_start_on_a_cpu_times_nothing_again(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "again", lambda *_: [(1, 1, 9.0)])
    for _ in range(2):
        start_costs(settings(), EXECUTOR, GEOMETRY)
    assert measured == ALL


WRONG = (
    replace(STEPS, widths=(1, 4)),
    replace(STEPS, batch_sizes=(1, 4, 8)),
    replace(STEPS, seconds=((0.5, 0.25), (1.0,))),
    replace(STEPS, seconds=((0.5, 0.25), (1.0, -2.0))),
    replace(STEPS, undrafted=(0.5,)),
    StepCosts(),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong.seconds))
def test_step_times_that_do_not_fit_are_measured_anew(
    wrong: StepCosts, measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as another:
        another.setattr(module, "measure_steps", lambda *_: wrong)
        start_costs(on_a_gpu(settings()), EXECUTOR, GEOMETRY)
    assert start_costs(on_a_gpu(settings()), EXECUTOR, GEOMETRY).steps == STEPS
    assert measured[-2:] == ["measure_steps", "ceiling_of"] and "do not fit" in caplog.text


def test_other_code_is_measured_itself(tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "step.py"
    monkeypatch.setattr(module, "_sources", lambda _: [source])
    for text in ("a = 1", "a = 1", "a = 2"):
        source.write_text(text)
        start_costs(settings(), EXECUTOR, GEOMETRY)
    assert measured == ALL * 2


def test_the_code_of_a_step_is_that_of_kernels_models_drafts_the_worker_and_its_parts_of_features() -> None:
    names = {"/".join(path.parts[-3:]) for path in module._sources()}
    assert {"overlap_spec/worker/executor.py", "overlap_spec/speculative/rows.py"} <= names
    assert {"models/layers/linear.py", "cuda/wide_linear.cu", "overlap_spec/sampling/sampler.py"} & names
    modules = [Path(each.__file__ or "") for each in features.modules(features.WORKER)]
    assert modules and {"/".join(path.parts[-3:]) for path in modules} <= names
    beside = {"features/grammar/step.py", "features/grammar/window_masks.py"}  # which its worker's part imports
    assert beside <= names or not features.is_there("grammar")
    assert not any("__pycache__" in name or "scheduler" in name or "frontend" in name for name in names)


@pytest.mark.parametrize("what", ["draft", "token map"])
def test_another_draft_or_token_map_is_measured_itself(what: str, tmp_path: Path, measured: list[str]) -> None:
    """By what they hold: the same draft in another folder is the same."""
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, content in zip(folders, ("4 layers", "4 layers", "5 layers"), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(content)
        given = {"draft_path": str(folder)} if what == "draft" else {"token_map": str(folder / "config.json")}
        start_costs(replace(settings(), spec=replace(settings().spec, **given)), EXECUTOR, GEOMETRY)
    assert measured == ALL * 2


def test_another_driver_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(module, "DRIVER", driver)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda: "a GPU")
    without = DEVICE_AND_COMPILERS()
    assert without[0] == "a GPU" and any(fact.startswith("torch ") for fact in without)
    driver.write_text("580.1")
    assert DEVICE_AND_COMPILERS() == (*without, "580.1")


SEEN = {  # by struct, the fields that the key has; what others hold changes no step's time
    Settings: {"model", "spec", "cache", "scheduler", "num_threads", "graph_batch_sizes", "compile_max_batch"}
    | {"logit_processor", "features", "attention", "skip_tokenizer_init", "ranks"},
    ModelSettings: {"files", "dtype", "device", "max_len", "keeps_integers", "deterministic"},
    ModelFiles: {"config", "quantization", "load_format"},
    CacheSettings: {"page_size", "kv_dtype"},
}
UNSEEN = {
    Settings: {"server", "link", "log_level", "threads_given", "spin_s", "recovery", "supervisor", "trace_dir"}
    | {"watched", "proposes_forced", "audit", "adapt"},  # names, links, waiting, and what requests bring or teach
    ModelSettings: {"name", "aliases"},
    ModelFiles: {"weights", "tokenizer_dir", "eos_token_ids", "context_length", "vocab_size", "preset_draft"}
    | {"preset_spec", "sampling_defaults", "chat_template"},  # paths, texts, and what `config` or `spec` has too
    CacheSettings: {"max_total_tokens", "mem_fraction", "prefix_cache"}
    | {"state_ratio", "max_states", "snapshot_interval"},  # how much is kept, not how fast it is read
}


@pytest.mark.parametrize("kind", SEEN, ids=lambda kind: kind.__name__)
def test_every_setting_is_in_the_key_or_is_known_to_change_no_time(kind: Any) -> None:
    """A new one fails here until it is in one of the lists, and in `what_they_depend_on` if in the first."""
    assert SEEN[kind] | UNSEEN[kind] == {field.name for field in fields(kind)}
    assert not SEEN[kind] & UNSEEN[kind]


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
