"""A decoder whose heads and inner columns are divided over two shards is the whole one."""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from support.paged_rows import Paged
from support.threaded_ranks import SummedBy
from support.tiny.models import CPU, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.models.interfaces import TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.decoder import PreNormLayer, SelfAttention
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.parallel import RowParallelLinear
from overlap_spec.models.targets.decoder import DecoderWeights

F64 = torch.float64
SHARDS = 2
TOKENS = torch.tensor([3, 77, 9, 12, 101, 5, 64])


class ThreadGroup:
    """Sums the tensors that threads bring, each call's after all have come."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SHARDS, timeout=60)
        self._brought: list[Tensor | None] = [None] * SHARDS
        self.calls = 0

    def reduction(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_reduce(part: Tensor) -> Tensor:
            self._brought[rank] = part
            self._barrier.wait()
            total = torch.stack([tensor for tensor in self._brought if tensor is not None]).sum(0)
            self.calls += rank == 0
            self._barrier.wait()  # before another call's parts are brought
            return total

        return all_reduce


def shard_of(whole: PreNormLayer, rank: int, all_reduce: Callable[[Tensor], Tensor]) -> PreNormLayer:
    """Its share of heads, each with its key and value head, and of the MLP's inner columns."""
    attention, mlp = whole.attention, whole.mlp
    assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
    assert isinstance(attention.qkv, Linear)
    shape = attention.shape
    sizes = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    qkv = torch.cat([part.chunk(SHARDS)[rank] for part in matrix(attention.qkv).split(sizes)])
    gate_up = torch.cat([part.chunk(SHARDS)[rank] for part in matrix(mlp.gate_up).chunk(2)])

    def row_parallel(linear: object) -> RowParallelLinear:
        return RowParallelLinear(Linear(matrix(linear).chunk(SHARDS, dim=1)[rank].contiguous()), SummedBy(all_reduce))

    heads = replace(shape, num_heads=shape.num_heads // SHARDS, num_kv_heads=shape.num_kv_heads // SHARDS)
    return PreNormLayer(
        whole.input_norm,
        SelfAttention(Linear(qkv), row_parallel(attention.output), heads),
        whole.mlp_norm,
        GatedMLP(Linear(gate_up), row_parallel(mlp.down)),
    )


def matrix(linear: object) -> Tensor:
    assert isinstance(linear, Linear)
    return linear.matrix()


def run(weights: DecoderWeights) -> TargetOutput:
    paged = Paged(num_requests=1)
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    return weights.attach(cache, 64, aux_layers=(0,)).forward(TOKENS, paged.rows([len(TOKENS)]))


def test_two_shards_are_the_whole() -> None:
    whole, group = load_tiny_target(tiny_target(3, context=1.0), F64), ThreadGroup()
    outputs: list[TargetOutput | None] = [None] * SHARDS

    def rank(index: int) -> None:
        layers = tuple(shard_of(layer, index, group.reduction(index)) for layer in whole.layers)
        shard = replace(whole, layers=layers)
        assert shard.kv_shape == replace(whole.kv_shape, num_kv_heads=whole.kv_shape.num_kv_heads // SHARDS)
        assert shard.work.pair_flop * SHARDS == whole.work.pair_flop
        outputs[index] = run(shard)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(SHARDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = run(whole)
    assert group.calls == 2 * len(whole.layers), "one reduction for attention and one for the MLP"
    for output in outputs:
        assert output is not None, "a shard failed"
        torch.testing.assert_close(output.hidden, expected.hidden, atol=1e-12, rtol=0)
        torch.testing.assert_close(output.aux, expected.aux, atol=1e-12, rtol=0)


def test_a_partial_product_alone_is_not_the_whole() -> None:
    whole = Linear(torch.randn(8, 6, dtype=F64))
    x, shard = torch.randn(3, 6, dtype=F64), Linear(whole.matrix()[:, :3].contiguous())
    other = x[:, 3:] @ whole.matrix()[:, 3:].T
    parallel = RowParallelLinear(shard, SummedBy(lambda part: part + other))
    torch.testing.assert_close(parallel(x[:, :3]), whole(x))
    assert not torch.allclose(parallel.partial(x[:, :3]), whole(x))
    assert parallel.work.row_flop * 2 == whole.work.row_flop
