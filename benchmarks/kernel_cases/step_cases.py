"""Calls of the ops of a decode step, as a step makes them: many in one CUDA graph, each a dependent launch.

A case holds one call for each set of weights (or cache, or tokens), which are so many that they do not stay in the L2
cache from one turn to the next. Activations are the same in all of them: in a step, too, the kernel before has just
written them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention, decode_attention_reference
from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.linear.dense import (
    DenseWeight,
    fused_linear_reference,
    linear_add_reference,
    linear_logits_reference,
)
from overlap_spec_kernels.linear.fused_linear import fused_linear, linear_add, linear_logits
from overlap_spec_kernels.linear.linear_argmax import linear_argmax
from overlap_spec_kernels.norm.draft_input import draft_input, draft_input_reference
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.norm.select_rows import select_rows, select_rows_reference
from overlap_spec_kernels.window.gather_window import gather_window, gather_window_reference
from overlap_spec_kernels.window.judge_chain import judge_chain, judge_chain_reference
from overlap_spec_kernels.window.place_guesses import place_guesses, place_guesses_reference
from torch import Tensor

from kernel_cases.inputs import decode_inputs, to_device
from kernel_cases.shapes import (
    DTYPE,
    EPS,
    PAGE_SIZE,
    TOLERANCE,
    Shape,
    assert_alike,
    bytes_of,
    random_rows,
    size_of,
    widened,
)

NUM_ROWS = (1, 4, 16, 32, 64)  # of a step; slots for the ops that have a program per slot
WIDTH = 4  # rows of a slot
NUM_KEYS = (500, 2000)
CAPACITY = 4096  # tokens that a page table has columns for
MOST_COPIES = 256

Op = Callable[..., Any]


class StepCase(NamedTuple):
    """One timed call per set of weights. `check` raises AssertionError where the kernel and the reference differ."""

    op: str
    model: str
    workload: str
    num_rows: int
    num_bytes: int
    calls: Sequence[Callable[[], object]]
    check: Callable[[], None]


class Place(NamedTuple):
    """Where cases live. `rotated_bytes`: what all sets of weights are together at least."""

    device: str
    rotated_bytes: int
    num_rows: tuple[int, ...] = NUM_ROWS

    def copies(self, num_bytes: int) -> int:
        """How many sets of so many bytes."""
        return max(min(ceil_div(self.rotated_bytes, num_bytes), MOST_COPIES), 2)

    def weights(self, size_n: int, size_k: int) -> list[Tensor]:
        """Linears [size_n, size_k] whose results are about as large as what goes in."""
        count = self.copies(size_n * size_k * DTYPE.itemsize)
        return [random_rows(self.device, size_n, size_k, scale=size_k**-0.5) for _ in range(count)]


def step_cases(model: str, shape: Shape, place: Place) -> Iterator[StepCase]:
    """Every op of a step that depends on the model."""
    for make in (linear_cases, head_cases, attention_cases, draft_cases):
        for case in make(shape, place):
            yield case._replace(model=model)


def linear_cases(shape: Shape, place: Place) -> Iterator[StepCase]:
    """The four linears of a layer."""
    size, inner, (num_heads, num_kv_heads, head_dim) = shape.hidden, shape.intermediate, shape.heads
    attended = num_heads * head_dim
    for name, size_n, gated in (
        ("q, k, v", attended + 2 * num_kv_heads * head_dim, False),
        ("gate, up", 2 * inner, True),
    ):
        weights = place.weights(size_n, size)
        for num_rows in place.num_rows:
            stream = stream_of(size, num_rows, place.device)
            inputs = [(stream, DenseWeight(weight), gated) for weight in weights]
            written = num_rows * (size_n // 2 if gated else size_n) * DTYPE.itemsize
            moved = size_of(weights[0]) + size_of(stream.weighted) + written
            yield case_of(fused_linear, fused_linear_reference, inputs, moved, name, num_rows)
    for name, size_k in (("output", attended), ("down", inner)):
        weights = place.weights(size, size_k)
        for num_rows in place.num_rows:
            x, residual = (random_rows(place.device, num_rows, n) for n in (size_k, size))
            norm = Norm(1 + random_rows(place.device, size, scale=0.1), EPS)
            moved = size_of(weights[0]) + size_of(x) + 3 * size_of(residual) + size_of(norm.weight)
            added = [(x, DenseWeight(weight), residual, norm) for weight in weights]
            yield case_of(linear_add, linear_add_reference, added, moved, name, num_rows)


def head_cases(shape: Shape, place: Place) -> Iterator[StepCase]:
    """Logits of the target; the largest logit of target and draft."""
    for name, size_n in (("head", shape.vocabulary), ("draft head", shape.draft_vocabulary)):
        weights = place.weights(size_n, shape.hidden)
        for num_rows in place.num_rows:
            x = stream_of(shape.hidden, num_rows, place.device)
            inputs = [(x, DenseWeight(weight)) for weight in weights]
            read = size_of(weights[0]) + size_of(x.weighted)
            if name == "head":
                moved = read + 4 * num_rows * size_n
                yield case_of(linear_logits, linear_logits_reference, inputs, moved, name, num_rows)
            case = case_of(linear_argmax, linear_logits_reference, inputs, read + 8 * num_rows, name, num_rows)
            yield case._replace(check=partial(check_argmax, *inputs[0]))


def check_argmax(x: Normed, weight: DenseWeight) -> None:
    """The logit of the column that was found is the largest one, but for rounding. Raises: AssertionError."""
    logits = linear_logits_reference(widened(x), widened(weight))
    found = logits.gather(1, linear_argmax(x, weight)[:, None])
    torch.testing.assert_close(found, logits.amax(1, keepdim=True), rtol=TOLERANCE, atol=TOLERANCE)


def attention_cases(shape: Shape, place: Place) -> Iterator[StepCase]:
    """Windows of WIDTH rows, or one row, at two lengths."""
    scratch = DecodeScratch.allocate(shape.heads.head_dim, torch.device(place.device))
    for num_keys in NUM_KEYS:
        spare = (CAPACITY - num_keys) // PAGE_SIZE - 1
        for num_rows in place.num_rows:
            width = min(num_rows, WIDTH)
            lengths = [num_keys] * (num_rows // width)
            drawn = decode_inputs(shape.heads, width, lengths, PAGE_SIZE, DTYPE, spare)
            qkv, cos_sin, positions, table, k_cache, v_cache = (to_device(value, place.device) for value in drawn[:6])
            cached = 2 * num_keys * len(lengths) * shape.heads.num_kv_heads * shape.heads.head_dim * DTYPE.itemsize
            assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
            fixed = (qkv, cos_sin, positions, table)
            inputs = [
                (*fixed, k_cache.clone(), v_cache.clone(), scratch, drawn.scale) for _ in range(place.copies(cached))
            ]
            yield case_of(
                decode_attention, _attention_reference, inputs, cached + 2 * size_of(qkv), f"{num_keys} keys", num_rows
            )


def _attention_reference(*values: Any) -> Tensor:
    qkv, cos_sin, positions, page_table, k_cache, v_cache, _, scale = values
    return decode_attention_reference(qkv, cos_sin, positions, page_table, k_cache, v_cache, scale)


def draft_cases(shape: Shape, place: Place) -> Iterator[StepCase]:
    """What goes into the draft head, and which of its rows goes on."""
    size, device = shape.hidden, place.device
    embedding, norms = random_rows(device, shape.vocabulary, size), random_rows(device, 2, size)
    for num_rows in place.num_rows:
        features = random_rows(device, num_rows, size)
        tokens = torch.randint(shape.vocabulary, (MOST_COPIES, num_rows), device=device)
        inputs = [(row, embedding, norms[0], features, norms[1], EPS) for row in tokens]
        moved = 4 * size_of(features) + size_of(norms)
        yield case_of(draft_input, draft_input_reference, inputs, moved, "norms, side by side", num_rows)
    for num_slots in place.num_rows:
        rows = random_rows(device, num_slots, WIDTH, size)
        index = torch.randint(WIDTH, (num_slots,), device=device)
        moved = 2 * size_of(rows) // WIDTH
        yield case_of(select_rows, select_rows_reference, [(rows, index)], moved, f"1 of {WIDTH}", num_slots)


def slot_cases(place: Place) -> Iterator[StepCase]:
    """The ops on slot rows, which are the same for every model."""
    for num_slots in place.num_rows:
        slots = torch.randperm(num_slots, device=place.device)
        length = torch.full((num_slots + 1,), NUM_KEYS[0], device=place.device)
        window = torch.randint(4, (num_slots + 1, WIDTH), device=place.device)
        num_pages = ceil_div(NUM_KEYS[0] + 2 * WIDTH, PAGE_SIZE)  # as many as are gathered
        table = torch.randint(1 << 20, (num_slots + 1, num_pages), dtype=torch.int32, device=place.device)
        gathered = (slots, length, window, table, WIDTH, PAGE_SIZE)
        out = gather_window_reference(*gathered)
        yield case_of(
            gather_window, gather_window_reference, [gathered], 2 * bytes_of(out), f"{WIDTH} columns", num_slots
        )
        drawn, guesses = torch.randint(4, (num_slots, WIDTH), device=place.device), window[:num_slots, 1:].t()
        judged = (drawn, out.window_tokens, slots, out.lengths, length.clone(), window.clone(), num_slots)
        moved = bytes_of(judge_chain_reference(*judged)) + bytes_of(judged[:4])
        yield case_of(judge_chain, judge_chain_reference, [judged], moved, f"{WIDTH} columns", num_slots)
        placed = (window.clone(), slots, guesses.contiguous(), torch.full_like(length, WIDTH), num_slots)
        moved = 2 * size_of(placed[2])
        yield case_of(place_guesses, place_guesses_reference, [placed], moved, f"{WIDTH - 1} guesses", num_slots)


def case_of(
    op: Op, reference: Op, inputs: Sequence[tuple[Any, ...]], num_bytes: int, workload: str, num_rows: int
) -> StepCase:
    """Bind an op to each of its inputs; the check is on the first, writes included, against float32."""

    def outcome(run: Op, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        owned = tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
        result = run(*owned)
        written = tuple(value for value in owned if isinstance(value, Tensor) and value.dtype == torch.int64)
        return written if result is None else (result, *written)

    def check() -> None:
        assert_alike(outcome(op, inputs[0]), outcome(reference, tuple(widened(value) for value in inputs[0])))

    calls = [partial(op, *arguments) for arguments in inputs]
    return StepCase(op.__name__, "", workload, num_rows, num_bytes, calls, check)


def stream_of(size: int, num_rows: int, device: str) -> Normed:
    """A residual as the linear before leaves it."""
    x, residual = (random_rows(device, num_rows, size) for _ in range(2))
    weight = random_rows(device, size, size, scale=size**-0.5)
    return linear_add(x, DenseWeight(weight), residual, Norm(1 + random_rows(device, size, scale=0.1), EPS))
