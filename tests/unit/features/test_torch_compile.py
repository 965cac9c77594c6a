"""torch.compile of the sampler: the same draws, up to a batch size, and refused by name where it does nothing."""

import shutil
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import NotMadeError, made_before

from overlap_spec.config import EngineConfig, Machine, ModelFiles, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError
from overlap_spec.features.torch_compile.worker import compiled_draw
from overlap_spec.sampling.context import SAMPLING_WORK, Sampling, SamplingWork
from overlap_spec.sampling.sampler import draw_columns
from overlap_spec.worker.build import replaced

FILES = ModelFiles(weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128)


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler, and there is no g++: install it"
)


@pytest.mark.full_but_every(20)
@pytest.mark.slow_but_every(7)
@needs_compiler
@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize("work", SAMPLING_WORK, ids=str)
@pytest.mark.parametrize("max_batch", [2, 3], ids=["eager", "compiled"])
def test_draws_are_the_same(make_batch, work: SamplingWork, max_batch: int) -> None:
    draw = compiled_draw(max_batch)
    random = torch.Generator().manual_seed(3)
    batch = make_batch([10, 20, 30], temperature=0.8 if work.sampled else 0.0)
    sampling = replace(batch.sampling, work=work, top_k=torch.tensor([5, 64, 1]))
    positions = batch.lengths[:, None] + torch.arange(4)
    with torch.inference_mode():
        for _ in range(5):
            logits = torch.randn(3, 4, 64, generator=random)
            expected = draw_columns(logits, positions, sampling, torch.arange(64))
            assert torch.equal(draw(logits, positions, sampling, torch.arange(64)), expected)


def test_larger_batches_are_not_compiled(make_batch, monkeypatch) -> None:
    compiled: list[int] = []

    def compile_nothing(function, **options):
        return lambda logits, *rest: compiled.append(len(logits)) or function(logits, *rest)

    monkeypatch.setattr(torch, "compile", compile_nothing)
    draw = compiled_draw(2)
    for size in (3, 2, 1):
        batch = make_batch([10] * size)
        assert draw(torch.randn(size, 1, 8), batch.lengths[:, None], batch.sampling, torch.arange(8)).shape == (size, 1)
    assert compiled == [2, 1]


def test_no_capture_compiles_what_no_run_has(make_batch, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    draw, batch = compiled_draw(2), make_batch([10, 20])
    sampled = replace(batch.sampling, work=SamplingWork(sampled=True, filtered=False, processed=False))

    def draw_once(sampling: Sampling = batch.sampling, rows: int = 1) -> None:
        draw(torch.randn(2, rows, 8), torch.zeros(2, rows, dtype=torch.int64), sampling, torch.arange(8))

    draw_once()
    with made_before():
        draw_once()
        for new in ({"sampling": sampled}, {"rows": 3}):
            with pytest.raises(NotMadeError, match="compiled"):
                draw_once(**new)
    draw_once(sampled)
    with made_before():
        draw_once(sampled)


def test_filters_are_not_compiled(make_batch, monkeypatch) -> None:
    def compile_nothing(function, **options):
        return lambda *arguments: pytest.fail("compiled")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    batch = make_batch([10, 20], temperature=0.8)
    sampling = replace(batch.sampling, work=SamplingWork(sampled=True, filtered=True, processed=False))
    arguments = torch.randn(2, 1, 8), batch.lengths[:, None], sampling, torch.arange(8)
    assert torch.equal(compiled_draw(2)(*arguments), draw_columns(*arguments))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_compiled_draws_the_same(make_batch, monkeypatch, temperature: float) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    batch = make_batch([10, 20], temperature=temperature)
    work = SamplingWork(sampled=temperature > 0, filtered=False, processed=False)
    logits = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(3))
    arguments = logits, batch.lengths[:, None], replace(batch.sampling, work=work), torch.arange(64)
    assert torch.equal(compiled_draw(2)(*arguments), draw_columns(*arguments))


def test_an_executor_draws_so_where_the_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for settings in (None, settle()):
        assert replaced("draw", draw_columns, settings) is draw_columns
    assert replaced("draw", draw_columns, settle(enable_torch_compile=True)) is not draw_columns


def settle(has_cuda: bool = True, **asked: object) -> Settings:
    config = EngineConfig(speculative_algorithm="NONE", **asked)
    return resolve(config, FILES, Machine(num_cores=2, has_cuda=has_cuda))[0]


def test_the_batch_size_is_sglangs_or_the_one_asked_for() -> None:
    assert settle().compile_max_batch == 0
    assert settle(enable_torch_compile=True).compile_max_batch == 32
    assert settle(enable_torch_compile=True, torch_compile_max_bs=2).compile_max_batch == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"has_cuda": False, "enable_torch_compile": True}, "--enable-torch-compile: .* CPU"),
        ({"enable_torch_compile": True, "disable_cuda_graph": True}, "--enable-torch-compile: .*--disable-cuda-graph"),
        ({"torch_compile_max_bs": 8}, "--torch-compile-max-bs: .*--enable-torch-compile"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(asked: dict[str, bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(**asked)
