"""One awkward case of every kernel, small enough for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python -m pytest -m cuda tests/gpu/test_sanitizer_cases_cuda.py

benchmarks/sanitizer.py does so for kernels in CUDA C++, one at a time, and looks for races too. Without torch's
caching, whatever is read or written outside a tensor is outside of an allocation. Sizes are odd, rows fewer than a
tile's, page tables longer than what is owned. Values are checked elsewhere; here only that there are any.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, decode_inputs, rope_inputs, to_device, tree_inputs
from overlap_spec_kernels import (
    Candidates,
    DecodeScratch,
    DenseWeight,
    Norm,
    TokenRows,
    add_children,
    add_rms_norm,
    decode_attention,
    draft_input,
    embed_norm,
    expand_tree,
    fused_linear,
    gather_tree,
    gather_window,
    judge_chain,
    judge_tree,
    linear_add,
    linear_argmax,
    linear_logits,
    marginal_tree,
    move_cache_rows,
    paged_attention,
    place_guesses,
    place_tree,
    rms_norm,
    rope_kv_write,
    select_rows,
    select_tree,
    silu_mul,
    top_tokens,
    tree_attention,
    write_slots,
)
from overlap_spec_kernels.attention.short_decode import Step, attend
from overlap_spec_kernels.linear.call import Call
from overlap_spec_kernels.linear.packed_products import PackedProducts
from overlap_spec_kernels.linear.packed_stream import PackedStream
from overlap_spec_kernels.linear.wide_linear import ARGMAX, GATED
from overlap_spec_kernels.nvrtc import runs_hopper
from support.slot_changes import as_packed, copied, random_changes, slot_tables
from support.step_inputs import draws, slot_state, step_slots, token_rows
from support.tree_inputs import candidate_trees, child_inputs, level_inputs, moves, random_caches, tied_logs, tree_state
from test_quantized_linear_cuda import weight_of
from torch import Tensor

FLOAT, BFLOAT = torch.float32, torch.bfloat16
HEADS = HeadShape(6, 2, 96)


def on_gpu(*values: Any) -> tuple[Any, ...]:
    return tuple(to_device(value, "cuda") for value in values)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).cuda()


def rows_ops(dtype: torch.dtype) -> list[Tensor]:
    x, weight = drawn(3, 60, dtype=dtype), drawn(60, dtype=dtype)
    return [rms_norm(x, weight, 1e-5), *add_rms_norm(x, x, weight, 1e-5), silu_mul(x)]


def rope(dtype: torch.dtype) -> list[Tensor]:
    return [rope_kv_write(*on_gpu(*rope_inputs(HEADS, 7, 16, dtype)))]


def paged(dtype: torch.dtype) -> list[Tensor]:
    """Uneven chunks, and a window whose keys are split."""
    requests = [[(5, 7), (0, 33), (19, 1)], [(300, 3), (0, 3)]]
    return [paged_attention(*on_gpu(*attention_inputs(HEADS, r, 16, dtype, spare_pages=30))) for r in requests]


def decode(dtype: torch.dtype) -> list[Tensor]:
    """One split that takes everything, and many that are combined."""
    outs = []
    for num_programs in (1, 64):
        *tensors, scale = on_gpu(*decode_inputs(HEADS, 3, [300, 0, 17], 16, dtype, spare_pages=30))
        scratch = DecodeScratch.allocate(HEADS.head_dim, torch.device("cuda"), num_programs)
        outs.append(decode_attention(*tensors, scratch, scale))
    return outs


def maps(dtype: torch.dtype) -> list[Tensor]:
    """Widths that take each of the kernels: rows in registers, and streamed in chunks of 64 and 256."""
    outs = []
    for num_rows, size, inner in ((3, 192, 130), (17, 192, 130), (5, 1280, 72)):
        x, residual = drawn(num_rows, size, dtype=dtype), drawn(num_rows, inner, dtype=dtype)
        norm = Norm(drawn(inner, dtype=dtype), 1e-5)
        stream = linear_add(x, DenseWeight(drawn(inner, size, dtype=dtype)), residual, norm)
        outs += [stream.normalised(), fused_linear(stream, DenseWeight(drawn(90, inner, dtype=dtype)))]
        outs += [fused_linear(x, DenseWeight(drawn(66, size, dtype=dtype)), gated=True)]
        outs += [
            linear_logits(x, DenseWeight(drawn(77, size, dtype=dtype))),
            linear_argmax(x, DenseWeight(drawn(77, size, dtype=dtype))).float(),
        ]
    return outs


def step(dtype: torch.dtype) -> list[Tensor]:
    """The ops around a step's forwards; of seven rows two are the dummy slot."""
    state = slot_state(7, 5, 16)
    slots = step_slots(state, 7)
    window, wanted = draws("by chance", state.window[slots, :3])
    length, windows, _ = on_gpu(*state)
    at, lengths = on_gpu(slots, state.length[slots])
    gathered = gather_window(at, *on_gpu(*state), 3, 16)
    store = token_rows(slots, state)
    store = TokenRows(*on_gpu(store.pool, store.page_table), store.page_size)
    judged = judge_chain(*on_gpu(wanted, window), at, lengths, length, windows, state.dummy, None, store)
    guesses, most_steps = torch.ones(2, 7, dtype=torch.int64, device="cuda"), torch.ones_like(length)
    place_guesses(windows, at, guesses, most_steps, state.dummy)
    selected = select_rows(drawn(7, 3, 60, dtype=dtype), judged.accept_len)
    norm, embedding = drawn(60, dtype=dtype), drawn(9, 60, dtype=dtype)
    drafted = draft_input(torch.arange(7, device="cuda"), embedding, norm, selected, norm, 1e-5)
    embedded = embed_norm(torch.arange(7, device="cuda"), embedding, norm, 1e-5)
    tables = slot_tables(7, 1030, 72, 25)
    moved = copied(tables, "cuda")
    write_slots(moved, as_packed(random_changes(5, tables)).cuda(), 5)
    return [gathered.positions.float(), judged.published.rows.float(), drafted, *embedded, moved.added.float()]


def tree_keys(dtype: torch.dtype) -> list[Tensor]:
    """Tiles that take all keys, and many splits that are combined; in a window; more keys than a word has bits.

    With heads of 96 columns by Triton's kernel, with others of 16 bits by Gluon's too.
    """
    outs = []
    for heads, num_programs, width, num_extra, window in (
        (HEADS, 1, 45, 45, None), (HEADS, 64, 5, 9, None), (HEADS, 64, 7, 70, 40),
        (HeadShape(6, 2, 64), 1, 45, 45, None), (HeadShape(8, 2, 128), 1, 32, 32, None),
    ):  # fmt: skip
        inputs = on_gpu(*tree_inputs(heads, width, num_extra, [300, 0, 17], 16, dtype, spare_pages=30))
        scratch = DecodeScratch.allocate(heads.head_dim, torch.device("cuda"), num_programs)
        outs.append(tree_attention(*inputs, window, scratch))
    return outs


def tree_step(dtype: torch.dtype) -> list[Tensor]:
    """The ops around a tree's forwards; of seven rows two are the dummy slot."""
    state = tree_state(7, 11, 16)
    slots, (length, window, parents, table) = step_slots(state, 7).cuda(), on_gpu(*state)
    gathered = gather_tree(slots, length, window, parents, table, 9, 16)
    drawn_tokens, store = torch.randint(0, 4, (7, 9), device="cuda"), token_rows(slots.cpu(), state)
    judged = judge_tree(
        drawn_tokens, gathered.window_tokens, gathered.parents, slots, gathered.lengths, length, window, state.dummy, 5,
        None, TokenRows(*on_gpu(store.pool, store.page_table), store.page_size),
    )  # fmt: skip
    k, v = on_gpu(*random_caches(3, 22, 16, (3, 20), dtype))
    move_cache_rows(k, v, *on_gpu(*moves(7, 5, 22, 16)))
    top = top_tokens(drawn(3, 4099, dtype=dtype), 5)
    guesses, guess_parents = select_tree(*on_gpu(*candidate_trees(7, 3, 4)), 10)
    place_tree(window, parents, slots, guesses, guess_parents, torch.ones_like(length), state.dummy)
    logs = tied_logs(3, 7, 5).cuda()
    best = marginal_tree(logs, torch.randint(0, 60, logs.shape, device="cuda"), torch.arange(60, device="cuda"), 31)
    candidates, *children = child_inputs(7, 3, 5)
    candidates = Candidates(*on_gpu(*candidates))
    add_children(candidates, *on_gpu(*children))
    worth, tokens, mask, features, own_bits = on_gpu(*level_inputs(7, 3, 5, 70, 2))
    level = expand_tree(worth, tokens, mask, features.to(dtype), own_bits)
    outs = [gathered.positions, judged.published.rows, candidates.tokens, best.guesses]
    return [*(out.float() for out in outs), k, v, top.log_probs, level.features]


def wide_linear() -> list[Tensor]:
    """More rows than a pair of tiles has, columns that end within a tile, fewer chunks of K than stages."""
    x, weight = drawn(300, 192, dtype=BFLOAT), drawn(496, 192, dtype=BFLOAT)
    gates, programs = x.new_empty((300, 248)), ARGMAX[0].num_programs(weight, False)
    best = torch.full((300, programs), -torch.inf, device="cuda").t()
    GATED.run(Call(x, weight, None, 0.0, True, gates), GATED.num_programs(weight, True))
    at = torch.full_like(best, -1, dtype=torch.int32)
    ARGMAX[0].run(Call(x, weight, None, 0.0, False, best=best, best_at=at), programs)
    return [gates, best.max(0).values]


def packed(rows: int, kind: str, size_k: int, kernel: type = PackedProducts) -> list[Tensor]:
    """All that a linear does with a weight in fragment order."""
    x, weight = drawn(rows, size_k, dtype=BFLOAT), weight_of(kind, 384, size_k).in_fragments()
    assert isinstance(weight.cut(x, False), kernel)
    norm = Norm(drawn(384, dtype=BFLOAT), 1e-5)
    total = linear_add(x, weight, drawn(rows, 384, dtype=BFLOAT), norm)
    return [fused_linear(x, weight, gated=True), linear_logits(x, weight), total.values, total.normalised()]


def packed_stream() -> list[Tensor]:
    cases = ((3, "fp8, rows"), (9, "int4, zero points"), (27, "fp8, blocks"))
    return [out for case in cases for out in packed(*case, 640, PackedStream)]


def packed_stream_every_lane_arrives() -> list[Tensor]:
    """Not one for all, after `__syncwarp`: racecheck may not know that order."""
    defines = PackedStream.defines
    with patch.object(PackedStream, "defines", lambda *given: (*defines(*given), "ARRIVING=32")):
        return packed_stream()


def packed_products() -> list[Tensor]:
    """K of few chunks, and of many, which programs share."""
    return [*packed(40, "fp8, rows", 640), *packed(20, "int4, zero points", 4096)]


def short_decode() -> list[Tensor]:
    """Clusters of 8 and of 2; page tables end with the requests."""
    outs = []
    for heads, lengths in ((HeadShape(6, 2, 64), [300, 0, 17]), (HeadShape(8, 8, 128), [41, 0, 7, 16, 90, 33, 1, 0])):
        *tensors, scale = on_gpu(*decode_inputs(heads, 3, lengths, 16, BFLOAT, spare_pages=0))
        outs.append(attend((Step(*tensors),), scale, read_before_wait=True))
    return outs


@pytest.mark.skipif(
    not (torch.cuda.is_available() and runs_hopper(torch.device("cuda"))), reason="they are for Hopper (sm_90a)"
)
@pytest.mark.parametrize(
    "ops",
    [wide_linear, packed_stream, packed_stream_every_lane_arrives, packed_products, short_decode],
    ids=lambda ops: ops.__name__,
)
def test_every_kernel_in_cuda(ops: Callable[[], list[Tensor]]) -> None:
    outs = ops()
    torch.cuda.synchronize()
    assert all(bool(out.isfinite().all()) for out in outs)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "ops", [rows_ops, rope, paged, decode, maps, step, tree_keys, tree_step], ids=lambda ops: ops.__name__
)
def test_every_kernel(ops: Callable[[torch.dtype], list[Tensor]], dtype: torch.dtype) -> None:
    outs = ops(dtype)
    torch.cuda.synchronize()
    assert all(bool(out.isfinite().all()) for out in outs)
