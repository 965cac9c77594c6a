"""Distinct experts of decode steps: counted within the forward, copied out now and then, reported as a mean."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, VOCAB, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.features.expert_reads import ExpertLayers, ExpertsRead, scheduler, worker
from overlap_spec.features.expert_reads.scheduler import ExpertFigures
from overlap_spec.features.expert_reads.worker import EVERY, ReadExperts
from overlap_spec.messages import Phase, Stats
from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers import experts
from overlap_spec.models.layers.experts import ExpertReads, distinct_experts
from overlap_spec.models.layers.layer_run import skipping_layers
from overlap_spec.models.targets.decoder import DecoderTarget
from overlap_spec.runtime.tracing import NO_TRACE
from overlap_spec.worker.devices import CpuDevice

MIXTURES = ["qwen3 moe", "mixtral", "deepseek v3", "gpt oss"]
F64 = torch.float64


def test_experts_are_counted_once_in_each_layer() -> None:
    first, second = torch.tensor([[0, 1], [1, 0], [5, 1]]), torch.tensor([[7, 7], [7, 7], [7, 7]])
    assert distinct_experts([first, second], 8) == 3 + 1
    assert distinct_experts([first, second], 7) == 3, "the last is one that all rows have"
    random = torch.Generator().manual_seed(2)
    drawn = [torch.randint(0, 60, (33, 4), generator=random) for _ in range(5)]
    assert distinct_experts(drawn, 60) == sum(len(set(each.flatten().tolist())) for each in drawn)


def attached(family: str, num_requests: int, **shape: int) -> tuple[DecoderTarget, Paged]:
    paged = Paged(num_requests)
    target = load_tiny_target(tiny_target(1, context=1.0, **TINY_FAMILIES[family], **shape))
    return target.attach(KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, F64, CPU), 64), paged


def run(target: DecoderTarget, rows: RowBatch, seed: int = 3) -> None:
    target.forward(torch.randint(6, VOCAB, rows.positions.shape, generator=torch.Generator().manual_seed(seed)), rows)


@pytest.mark.parametrize("family", MIXTURES)
def test_windows_are_counted_and_prompts_are_not(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the routers of the layers chose, written out."""
    target, paged = attached(family, 3)
    reads = target.count_experts()
    assert reads is not None
    chosen: list[Tensor] = []
    route = experts.Router.__call__

    def recorded(router: experts.Router, x: Tensor, common: Any = None) -> Any:
        routing = route(router, x, common)
        chosen.append(routing.experts)
        return routing

    monkeypatch.setattr(experts.Router, "__call__", recorded)
    run(target, paged.rows([5, 1, 9]))
    assert chosen and reads.sums.tolist() == [0, 0], "a prompt has nearly all of them"
    chosen.clear()
    run(target, paged.rows([4, 4, 4]))
    run(target, paged.rows([1, 1, 1]), seed=4)
    expected = sum(len(set(each.flatten().tolist())) for each in chosen)
    assert reads.sums.tolist() == [expected, len(chosen)]
    assert len(chosen) < expected < len(chosen) * reads.num_experts


def test_a_forward_that_leaves_out_layers_counts_those_that_run() -> None:
    target, paged = attached("mixtral", 2, layers=12)
    reads = target.count_experts()
    assert reads is not None
    with skipping_layers():
        run(target, paged.rows([2, 2]))
    experts_read, layers = reads.sums.tolist()
    assert 4 <= layers < 12 and experts_read >= 2 * layers


def test_a_dense_target_counts_nothing() -> None:
    target, paged = attached("llama", 2)
    assert target.count_experts() is None
    run(target, paged.rows([2, 2]))
    parts: Any = SimpleNamespace(target=target, device=CpuDevice())
    assert worker.attach(parts) is None
    limits: Any = SimpleNamespace(limits=SimpleNamespace(extensions=()))
    assert scheduler.attach(limits) is None


def test_the_worker_tells_of_every_so_many_decode_steps() -> None:
    reads = ExpertReads(60, [], CPU)
    reads.sums.copy_(torch.tensor([900, 90]))
    hook = ReadExperts(reads, CpuDevice())
    assert hook.ready() == (ExpertLayers(60),)
    hook.serves(NO_TRACE)
    told: list[ExpertsRead] = []
    for step in range(3 * EVERY):
        reads.sums += torch.tensor([11, 2])
        for phase in (Phase.PREFILL, Phase.DECODE):
            handle: Any = SimpleNamespace(plan=SimpleNamespace(phase=phase))
            hook.launched(handle)
        replies = hook.replies()
        assert bool(replies) == ((step + 1) % EVERY == 0) and not hook.replies()
        told += replies  # type: ignore[arg-type]  # it sends no others
    assert told == [ExpertsRead(11 * EVERY * times, 2 * EVERY * times) for times in (1, 2, 3)], "without the start's"


def test_a_report_has_the_mean_since_the_one_before() -> None:
    figures = ExpertFigures(60)
    assert figures.report(Stats()).experts_read is None
    assert figures.message(ExpertsRead(100, 10)) and not figures.message(ExpertLayers(60))
    found = figures.report(Stats(num_running=3))
    assert (found.experts_read, found.num_experts, found.num_running) == (10.0, 60, 3)
    assert figures.report(Stats()).experts_read == 10.0, "nothing new has come"
    figures.message(ExpertsRead(400, 20))
    assert figures.report(Stats()).experts_read == 30.0
