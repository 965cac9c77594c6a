"""What training a draft's chains does between its products: heads out of rows, and attention to a chain's few keys.

Each has a form for gradients. Legend: B samples, L rows, h and g query and KV heads of d values, j keys of a chain.
Row i of a chain that is at its step j reads key m, of 1 .. j, at row i - j + m; rows below j have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.attention.rope_kv_write import rotate_heads
from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, next_power_of_2, require, runs_triton

_NUM_WARPS = 4
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values


def split_rotated(qkv: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int) -> Heads:
    """Queries, keys and values of rows; row i of a sample is at place i, by which queries and keys are rotated.

    Shapes: qkv [B, L, (h + 2 g) d], cos_sin [L, d], cosines before sines -> [B, L, h, d], 2 [B, L, g, d].
    Raises: ValueError naming the argument. Sync: never.
    """
    count, length, _ = qkv.shape
    size = cos_sin.shape[1]
    require(qkv.is_contiguous() and qkv.shape[2] == (num_heads + 2 * num_kv_heads) * size, "qkv", "[B, L, (h + 2 g) d]")
    require(cos_sin.is_contiguous() and len(cos_sin) == length, "cos_sin", "[L, d], contiguous")
    if not runs_triton(qkv):
        return split_rotated_reference(qkv, cos_sin, num_heads, num_kv_heads)
    q, k, v = (qkv.new_empty(count, length, heads, size) for heads in (num_heads, num_kv_heads, num_kv_heads))
    _run_rotation(qkv, q, k, v, cos_sin, is_back=False)
    return q, k, v


def split_rotated_back(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
    """The gradient of `split_rotated` for `qkv`, from those of its results. Shapes: as there."""
    if not runs_triton(q):
        return split_rotated_back_reference(q, k, v, cos_sin)
    qkv = q.new_empty(*q.shape[:2], (q.shape[2] + 2 * k.shape[2]) * q.shape[3])
    _run_rotation(qkv, q.contiguous(), k.contiguous(), v.contiguous(), cos_sin, is_back=True)
    return qkv


def split_rotated_reference(qkv: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int) -> Heads:
    heads = qkv.unflatten(2, (-1, cos_sin.shape[1]))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 2)
    return _rotated(q, cos_sin), _rotated(k, cos_sin), v.contiguous()


def split_rotated_back_reference(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.chunk(2, 1)
    back = torch.cat((cos, -sin), 1)
    return torch.cat((_rotated(q, back), _rotated(k, back), v), 2).flatten(2)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Shapes: [B, L, h, d]."""
    places = torch.arange(len(cos_sin), device=x.device).repeat(len(x))
    return rotate_heads(x.flatten(0, 1), cos_sin, places).view_as(x)


def attend_own_keys(q: Tensor, keys: Tensor, values: Tensor, found: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of rows to their chain's keys, merged with attention to others. Rows below j give 0.

    Shapes: q [B, L, h, d], keys and values [j, B, L, g, d], found [B, L - j, h, d] and logs [B, h, L - j] f32, the
    logarithms of its sums -> [B, L, h, d], logarithms of all sums [B, h, L - j]. Logits are scaled by 1 / sqrt(d).
    Raises: ValueError naming the argument. Sync: never.
    """
    _check(q, keys, values)
    if not runs_triton(q):
        return attend_own_keys_reference(q, keys, values, found, logs)
    whole, sums = torch.empty_like(q), torch.empty_like(logs, memory_format=torch.contiguous_format)
    _own_keys_kernel[q.shape[0] * q.shape[1],](
        q, keys, values, found.contiguous(), logs.contiguous(), whole, sums, q.shape[0], q.shape[1], **_sizes(q, keys)
    )
    return whole, sums


def attend_own_keys_reference(
    q: Tensor, keys: Tensor, values: Tensor, found: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor]:
    step, dim = len(keys), q.shape[3]
    chain, keys, values = q[:, step:], _by_reader(keys, q), _by_reader(values, q)
    logits = (chain * keys).sum(-1).mT.to(logs.dtype) * dim**-0.5  # [j, B, h, n]
    sums = torch.logsumexp(torch.cat((logs[None], logits)), 0)
    shares = [(each - sums).exp().mT[..., None].to(q.dtype) for each in (logs, *logits)]
    whole = torch.zeros_like(q)
    whole[:, step:] = sum((share * value for share, value in zip(shares[1:], values, strict=True)), shares[0] * found)
    return whole, sums


def attend_own_keys_back(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, whole: Tensor, sums: Tensor, of_q: Tensor
) -> Heads:
    """Gradients for q, keys, values of `attend_own_keys`, which gave `whole` and `sums`.

    `of_q` [B, L - j, h, d]: what attention to the other keys adds to the gradient for q. Shapes: as there.
    """
    if not runs_triton(q):
        return attend_own_keys_back_reference(grad, q, keys, values, whole, sums, of_q)
    of_whole_q, of_keys, of_values = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    group = q.shape[2] // keys.shape[3]
    _own_keys_back_kernel[q.shape[0] * q.shape[1],](
        grad.contiguous(), q, keys, values, whole, sums, of_q.contiguous(), of_whole_q, of_keys, of_values,
        q.shape[0], q.shape[1], GROUP=group, KV_BLOCK=next_power_of_2(keys.shape[3]), **_sizes(q, keys),
    )  # fmt: skip
    return of_whole_q, of_keys, of_values


def attend_own_keys_back_reference(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, whole: Tensor, sums: Tensor, of_q: Tensor
) -> Heads:
    step, scale = len(keys), q.shape[3] ** -0.5
    chain, out, grad = q[:, step:], whole[:, step:], grad[:, step:]
    own_keys, own_values = _by_reader(keys, q), _by_reader(values, q)
    probs = ((chain * own_keys).sum(-1).to(sums.dtype) * scale - sums.mT).exp()  # [j, B, n, h]
    distance = (grad * own_values).sum(-1).to(sums.dtype) - (grad * out).sum(-1).to(sums.dtype)
    of_logits = (probs * distance * scale).to(q.dtype)[..., None]
    of_own = of_logits * chain, probs.to(q.dtype)[..., None] * grad
    of_whole_q = torch.zeros_like(q)
    of_whole_q[:, step:] = of_q + (of_logits * own_keys).sum(0)
    found = torch.zeros_like(keys), torch.zeros_like(values)
    for whole_, parts in zip(found, of_own, strict=True):
        for m, part in enumerate(parts, 1):
            of_group = part.unflatten(2, (keys.shape[3], -1)).sum(3)
            whole_[m - 1, :, m : m + part.shape[1]] = of_group
    return of_whole_q, *found


def _by_reader(kept: Tensor, q: Tensor) -> Tensor:
    """Keys or values by the row that reads them, for each query head. Shapes: [j, B, L, g, d] -> [j, B, n, h, d]."""
    step, rows = len(kept), q.shape[1] - len(kept)
    own = torch.stack([kept[m - 1, :, m : m + rows] for m in range(1, step + 1)])
    return own.repeat_interleave(q.shape[2] // kept.shape[3], 3)


def _check(q: Tensor, keys: Tensor, values: Tensor) -> None:
    require(q.dim() == 4 and q.is_contiguous(), "q", "[B, L, h, d], contiguous")
    shape = (len(keys), *q.shape[:2], keys.shape[3], q.shape[3])
    require(keys.shape == shape and keys.is_contiguous(), "keys", f"{list(shape)}, contiguous")
    require(values.shape == shape and values.is_contiguous(), "values", f"{list(shape)}, contiguous")
    require(q.shape[2] % keys.shape[3] == 0, "keys", f"KV heads of which {q.shape[2]} query heads are a multiple")
    require(0 < len(keys) < q.shape[1], "keys", f"1 to {q.shape[1] - 1} steps")


def _sizes(q: Tensor, keys: Tensor) -> dict[str, int]:
    """What the kernels of own keys have in common."""
    heads, size = q.shape[2:]
    block = {"HEADS_BLOCK": next_power_of_2(heads), "BLOCK": next_power_of_2(size)}
    return block | {"step": len(keys), "HEADS": heads, "KV_HEADS": keys.shape[3], "SIZE": size, "num_warps": _NUM_WARPS}


def _run_rotation(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, is_back: bool) -> None:
    heads, kv_heads, size = q.shape[2], k.shape[2], q.shape[3]
    _split_rotated_kernel[q.shape[0] * q.shape[1],](
        qkv, q, k, v, cos_sin, q.shape[1], HEADS=heads, KV_HEADS=kv_heads, HALF=size // 2,
        HEADS_BLOCK=next_power_of_2(heads + 2 * kv_heads), BLOCK=next_power_of_2(size // 2), IS_BACK=is_back,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


@TritonKernel
def _split_rotated_kernel(
    qkv_ptr: tl.tensor, q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, cos_sin_ptr: tl.tensor, length: int,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    IS_BACK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = 2 * HALF
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < HALF
    is_q = (heads < HEADS) & inside
    is_k = (heads >= HEADS) & (heads < HEADS + KV_HEADS) & inside
    is_v = (heads >= HEADS + KV_HEADS) & (heads < HEADS + 2 * KV_HEADS) & inside
    cos_sin = cos_sin_ptr + (row % length) * SIZE + columns
    cos = tl.load(cos_sin, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin + HALF, mask=inside, other=0.0).to(tl.float32)
    joined = qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + heads) * SIZE + columns
    of_q = q_ptr + (row * HEADS + heads) * SIZE + columns
    of_k = k_ptr + (row * KV_HEADS + heads - HEADS) * SIZE + columns
    of_v = v_ptr + (row * KV_HEADS + heads - HEADS - KV_HEADS) * SIZE + columns
    if IS_BACK:
        sin = -sin
        first = tl.load(of_q, mask=is_q, other=0.0) + tl.load(of_k, mask=is_k, other=0.0)
        first = (first + tl.load(of_v, mask=is_v, other=0.0)).to(tl.float32)
        second = tl.load(of_q + HALF, mask=is_q, other=0.0) + tl.load(of_k + HALF, mask=is_k, other=0.0)
        second = (second + tl.load(of_v + HALF, mask=is_v, other=0.0)).to(tl.float32)
    else:
        first = tl.load(joined, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
        second = tl.load(joined + HALF, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
    is_turned = heads < HEADS + KV_HEADS
    one = tl.where(is_turned, first * cos - second * sin, first).to(qkv_ptr.dtype.element_ty)
    other = tl.where(is_turned, second * cos + first * sin, second).to(qkv_ptr.dtype.element_ty)
    if IS_BACK:
        tl.store(joined, one, mask=is_q | is_k | is_v)
        tl.store(joined + HALF, other, mask=is_q | is_k | is_v)
    else:
        tl.store(of_q, one, mask=is_q)
        tl.store(of_q + HALF, other, mask=is_q)
        tl.store(of_k, one, mask=is_k)
        tl.store(of_k + HALF, other, mask=is_k)
        tl.store(of_v, one, mask=is_v)
        tl.store(of_v + HALF, other, mask=is_v)


@TritonKernel.with_options(do_not_specialize=("step",))
def _own_keys_kernel(
    q_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, found_ptr: tl.tensor, logs_ptr: tl.tensor,
    whole_ptr: tl.tensor, sums_ptr: tl.tensor, count: int, length: int, step: int,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row, for all heads."""
    row = tl.program_id(0).to(tl.int64)
    sample, place = row // length, row % length
    heads = tl.arange(0, HEADS_BLOCK)
    columns = tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < SIZE)[None, :]
    own = heads[:, None] * SIZE + columns[None, :]
    shared = (heads // (HEADS // KV_HEADS))[:, None] * SIZE + columns[None, :]
    if place < step:
        tl.store(whole_ptr + row * HEADS * SIZE + own, tl.zeros((HEADS_BLOCK, BLOCK), tl.float32), mask=inside)
    else:
        rows = length - step
        at_log = (sample * HEADS + heads) * rows + place - step
        q = tl.load(q_ptr + row * HEADS * SIZE + own, mask=inside, other=0.0).to(tl.float32)
        most = tl.load(logs_ptr + at_log, mask=heads < HEADS, other=0.0)
        first = found_ptr + (sample * rows + place - step) * HEADS * SIZE
        merged = tl.load(first + own, mask=inside, other=0.0).to(tl.float32)
        total = tl.full((HEADS_BLOCK,), 1.0, tl.float32)
        for m in range(1, step + 1):
            at = (((m - 1) * count + sample) * length + place - step + m) * KV_HEADS * SIZE + shared
            logit = tl.sum(q * tl.load(keys_ptr + at, mask=inside, other=0.0).to(tl.float32), 1) * (SIZE**-0.5)
            larger = tl.maximum(most, logit)
            fall, share = tl.exp(most - larger), tl.exp(logit - larger)
            value = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float32)
            merged = merged * fall[:, None] + share[:, None] * value
            total, most = total * fall + share, larger
        merged = (merged / total[:, None]).to(whole_ptr.dtype.element_ty)
        tl.store(whole_ptr + row * HEADS * SIZE + own, merged, mask=inside)
        tl.store(sums_ptr + at_log, most + tl.log(total), mask=heads < HEADS)


@TritonKernel.with_options(do_not_specialize=("step",))
def _own_keys_back_kernel(
    grad_ptr: tl.tensor, q_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, whole_ptr: tl.tensor,
    sums_ptr: tl.tensor, added_ptr: tl.tensor, of_q_ptr: tl.tensor, of_keys_ptr: tl.tensor, of_values_ptr: tl.tensor,
    count: int, length: int, step: int,
    GROUP: tl.constexpr, KV_BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr, HEADS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row: the gradient for its queries, then those for keys, over the query heads that share them."""
    row = tl.program_id(0).to(tl.int64)
    sample, place = row // length, row % length
    columns = tl.arange(0, BLOCK)
    heads = tl.arange(0, HEADS_BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < SIZE)[None, :]
    own = row * HEADS * SIZE + heads[:, None] * SIZE + columns[None, :]
    if place < step:
        tl.store(of_q_ptr + own, tl.zeros((HEADS_BLOCK, BLOCK), tl.float32), mask=inside)
    else:
        rows = length - step
        scale = SIZE**-0.5
        of_added = added_ptr + (sample * rows + place - step) * HEADS * SIZE + heads[:, None] * SIZE + columns[None, :]
        q = tl.load(q_ptr + own, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + own, mask=inside, other=0.0).to(tl.float32)
        out = tl.load(whole_ptr + own, mask=inside, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + (sample * HEADS + heads) * rows + place - step, mask=heads < HEADS, other=0.0)
        of_q = tl.load(of_added, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(grad * out, 1)
        for m in range(1, step + 1):
            at = (((m - 1) * count + sample) * length + place - step + m) * KV_HEADS * SIZE
            shared = at + (heads // GROUP)[:, None] * SIZE + columns[None, :]
            key = tl.load(keys_ptr + shared, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(values_ptr + shared, mask=inside, other=0.0).to(tl.float32)
            share = tl.exp(tl.sum(q * key, 1) * scale - sums)
            of_logit = share * (tl.sum(grad * value, 1) - mean) * scale
            of_q += of_logit[:, None] * key
        tl.store(of_q_ptr + own, of_q.to(of_q_ptr.dtype.element_ty), mask=inside)
        groups = tl.arange(0, KV_BLOCK)
        within = (groups < KV_HEADS)[:, None] & (columns < SIZE)[None, :]
        for m in range(1, step + 1):
            at = (((m - 1) * count + sample) * length + place - step + m) * KV_HEADS * SIZE
            at += groups[:, None] * SIZE + columns[None, :]
            key = tl.load(keys_ptr + at, mask=within, other=0.0).to(tl.float32)
            value = tl.load(values_ptr + at, mask=within, other=0.0).to(tl.float32)
            of_key = tl.zeros((KV_BLOCK, BLOCK), tl.float32)
            of_value = tl.zeros((KV_BLOCK, BLOCK), tl.float32)
            for member in tl.static_range(GROUP):
                head = groups * GROUP + member
                mine = row * HEADS * SIZE + head[:, None] * SIZE + columns[None, :]
                q_ = tl.load(q_ptr + mine, mask=within, other=0.0).to(tl.float32)
                grad_ = tl.load(grad_ptr + mine, mask=within, other=0.0).to(tl.float32)
                out_ = tl.load(whole_ptr + mine, mask=within, other=0.0).to(tl.float32)
                at_sum = (sample * HEADS + head) * rows + place - step
                sums_ = tl.load(sums_ptr + at_sum, mask=groups < KV_HEADS, other=0.0)
                share_ = tl.exp(tl.sum(q_ * key, 1) * scale - sums_)
                of_logit_ = share_ * (tl.sum(grad_ * value, 1) - tl.sum(grad_ * out_, 1)) * scale
                of_key += of_logit_[:, None] * q_
                of_value += share_[:, None] * grad_
            tl.store(of_keys_ptr + at, of_key.to(of_keys_ptr.dtype.element_ty), mask=within)
            tl.store(of_values_ptr + at, of_value.to(of_values_ptr.dtype.element_ty), mask=within)
