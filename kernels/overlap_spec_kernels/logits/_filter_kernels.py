"""The Triton functions of `filter_cutoff`, in the order of their launches.

    part_stats      (row, part)   the largest logit of each quarter of a part, the part's sum of weights
    first_pivots    (row, part)   a bracket of the cutoff by those; counts and weights above pivots in it
    more_pivots     (row, part)   the bracket between two pivots; if it still has many columns, pivots in that
    gather_bracket  (row, part)   the bracket again; its columns, into one list for each row
    select_cutoff   (row)         the cutoff, by bisection over the list

A weight is exp((logit - largest) / T). A bracket is [lo, hi): columns from hi on are kept, those below lo are dropped.
It is what the program of part 0 leaves for the kernels after it; every program of a row computes it alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_spec_kernels.launch import TritonKernel

if TYPE_CHECKING:
    import triton.language as tl


@TritonKernel.with_options(do_not_specialize=("rows",))
def part_stats_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: int,
    columns: int,
    temperature_stride: int,
    QUARTER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Maxima of quarters; the sum of exp((logit - the part's largest) / T)."""
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    quarter = tl.arange(0, 4)
    column = tl.program_id(1) * (4 * QUARTER) + quarter[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_ptr + row // rows * temperature_stride)
    if temperature > 0:
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=float("-inf"))
        logits = logits.to(tl.float32)
        maxima = tl.max(logits, axis=1)
        largest = tl.maximum(tl.max(maxima, axis=0), -3.0e38)  # finite even if all logits are -inf
        weights = tl.exp((logits - largest) * _inverse(temperature))
        tl.store(maxima_ptr + part * 4 + quarter, maxima)
        tl.store(sums_ptr + part, tl.sum(tl.sum(weights, axis=1), axis=0))


@TritonKernel.with_options(do_not_specialize=("rows",))
def first_pivots_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    brackets_ptr: tl.tensor,
    pivots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    fill_ptr: tl.tensor,
    rows: int,
    columns: int,
    temperature_stride: int,
    top_k_stride: int,
    top_p_stride: int,
    min_p_stride: int,
    num_parts: int,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A slot without filters, or greedy, has the bracket that keeps everything, and nothing is counted for it."""
    row = tl.program_id(0).to(tl.int64)
    slot = row // rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_ptr + slot * temperature_stride)
    top_k = tl.load(top_k_ptr + slot * top_k_stride)
    top_p = tl.load(top_p_ptr + slot * top_p_stride)
    min_p = tl.load(min_p_ptr + slot * min_p_stride)
    lo, hi = float("-inf"), float("inf")
    largest, spread, target = 0.0, 0.0, tl.zeros([], tl.float64)
    limited = (temperature > 0) & ((top_k < columns) | (top_p < 1))
    if (temperature > 0) & ((top_k < columns) | (top_p < 1) | (min_p > 0)):
        group, part = tl.arange(0, 4 * PARTS), tl.arange(0, PARTS)
        maxima = tl.load(maxima_ptr + row * num_parts * 4 + group, mask=group < 4 * num_parts, other=float("-inf"))
        of_parts = tl.max(tl.reshape(maxima, [PARTS, 4]), axis=1)
        sums = tl.load(sums_ptr + row * num_parts + part, mask=part < num_parts, other=0.0)
        largest = tl.max(maxima, axis=0)
        total = tl.sum(sums * tl.exp((of_parts - largest) * _inverse(temperature)), axis=0).to(tl.float64)
        target = tl.where(top_p < 1, top_p * total, float("inf")).to(tl.float64)
        if min_p > 0:
            lo = _at_least(largest.to(tl.float64) + temperature * tl.log(min_p))
        if top_p < 1:  # all that is below weighs less than what may be dropped
            below = tl.log(columns / (tl.maximum(1 - top_p, 1e-30) * total)) + 1e-3
            lo = tl.maximum(lo, (largest.to(tl.float64) - temperature * below).to(tl.float32))
        if top_k <= tl.sum((maxima > float("-inf")).to(tl.int32), axis=0):  # so many columns are as large
            better = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), axis=1)
            lo = tl.maximum(lo, tl.min(tl.where(better < top_k, maxima, float("inf")), axis=0))
        hi = _after(largest)
        smallest = tl.min(tl.where(group < 4 * num_parts, maxima, float("inf")), axis=0)
        spread = tl.where(lo > float("-inf"), largest - lo, tl.minimum(4 * (largest - smallest), 3.0e38) + 1e-3)
    inside = tl.where(limited, columns, 0)
    if tl.program_id(1) == 0:
        bracket_ptr = brackets_ptr + row * 8
        _store_bracket(bracket_ptr, lo, hi, 0, 0.0, inside, largest, target, tl.where(top_k < columns, top_k, columns))
        tl.store(fill_ptr + row, 0)
    if limited:
        place = row * num_parts + tl.program_id(1)
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=float("-inf"))
        _count_above(
            logits.to(tl.float32), largest, _inverse(temperature), lo, largest, spread,
            pivots_ptr + row * PIVOTS, counts_ptr + place * PIVOTS, masses_ptr + place * PIVOTS, PIVOTS,
        )  # fmt: skip


@TritonKernel.with_options(do_not_specialize=("rows", "num_rows"))
def more_pivots_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    brackets_ptr: tl.tensor,
    pivots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    rows: int,
    columns: int,
    temperature_stride: int,
    num_rows: int,
    num_parts: int,
    FEW: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A bracket with few columns is good enough. What is read is of level 0, what is written of level 1."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    bracket_ptr = brackets_ptr + row * 8
    lo, hi, count, mass, inside, largest, target, top_k = _load_bracket(bracket_ptr)
    if inside > 0:
        place = row * num_parts
        lo, hi, count, mass, inside = _narrowed(
            lo, hi, count, mass, target, top_k, num_parts,
            pivots_ptr + row * PIVOTS, counts_ptr + place * PIVOTS, masses_ptr + place * PIVOTS, PARTS, PIVOTS,
        )  # fmt: skip
    if tl.program_id(1) == 0:
        _store_bracket(bracket_ptr + num_rows * 8, lo, hi, count, mass, inside, largest, target, top_k)
    if inside > FEW:
        inverse = _inverse(tl.load(temperature_ptr + row // rows * temperature_stride))
        place = (num_rows + row) * num_parts + tl.program_id(1)
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=float("-inf"))
        spread = tl.where(lo > float("-inf"), hi - lo, 4 * (largest - hi) + 1e-3)
        _count_above(
            logits.to(tl.float32), largest, inverse, lo, hi, spread,
            pivots_ptr + (num_rows + row) * PIVOTS, counts_ptr + place * PIVOTS, masses_ptr + place * PIVOTS, PIVOTS,
        )  # fmt: skip


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def gather_bracket_kernel(
    logits_ptr: tl.tensor,
    brackets_ptr: tl.tensor,
    pivots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    fill_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    listed_at_ptr: tl.tensor,
    columns: int,
    num_rows: int,
    num_parts: int,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The list is in no order, and ends where it is full; `fill` counts what would be in it."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    bracket_ptr = brackets_ptr + (num_rows + row) * 8
    lo, hi, count, mass, inside, largest, target, top_k = _load_bracket(bracket_ptr)
    if inside > FEW:
        place = (num_rows + row) * num_parts
        lo, hi, count, mass, inside = _narrowed(
            lo, hi, count, mass, target, top_k, num_parts,
            pivots_ptr + (num_rows + row) * PIVOTS, counts_ptr + place * PIVOTS, masses_ptr + place * PIVOTS,
            PARTS, PIVOTS,
        )  # fmt: skip
    if tl.program_id(1) == 0:
        _store_bracket(bracket_ptr + num_rows * 8, lo, hi, count, mass, inside, largest, target, top_k)
    if inside > 0:
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=float("-inf"))
        logits = logits.to(tl.float32)
        between = ((logits >= lo) & (logits < hi) & (column < columns)).to(tl.int32)
        found = tl.sum(between, axis=0)
        if found > 0:
            place = tl.atomic_add(fill_ptr + row, found) + tl.cumsum(between, axis=0) - 1
            listed = (between != 0) & (place < CAPACITY)
            tl.store(listed_ptr + row * CAPACITY + place, logits, mask=listed)
            tl.store(listed_at_ptr + row * CAPACITY + place, column, mask=listed)


@TritonKernel.with_options(do_not_specialize=("rows", "num_rows"))
def select_cutoff_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    brackets_ptr: tl.tensor,
    fill_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    listed_at_ptr: tl.tensor,
    least_ptr: tl.tensor,
    last_ptr: tl.tensor,
    rows: int,
    columns: int,
    temperature_stride: int,
    num_rows: int,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sums of weights are integers, in units of 2^-40, so that the order of the list does not matter.

    If the list does not hold the bracket, the whole row takes its place: slow, but only logits that are alike do that.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    bracket_ptr = brackets_ptr + (2 * num_rows + row) * 8
    lo, hi, count, mass, inside, largest, target, top_k = _load_bracket(bracket_ptr)
    least, last = lo, tl.zeros([], tl.int64) + (columns - 1)
    if inside > 0:
        inverse = _inverse(tl.load(temperature_ptr + row // rows * temperature_stride))
        fill = tl.load(fill_ptr + row)
        whole = fill > CAPACITY
        values_ptr = listed_ptr + row * CAPACITY
        if whole:
            values_ptr = logits_ptr + row * columns
            fill = fill * 0 + columns
        room = tl.maximum((tl.minimum(target - mass, 4.0e6) * 1099511627776.0).to(tl.int64), 1)
        places = (top_k - count).to(tl.int64)
        low, high = _key(lo).to(tl.int64), _key(hi).to(tl.int64) - 1  # `high` keeps all that is above it: nothing
        while low < high:
            middle = (low + high) >> 1
            above, weight = _sums_above(values_ptr, fill, lo, hi, middle, largest, inverse, BLOCK)
            keeps = (above < places) & (weight < room)
            low, high = tl.where(keeps, low, middle + 1), tl.where(keeps, middle, high)
        above, weight = _sums_above(values_ptr, fill, lo, hi, low, largest, inverse, BLOCK)
        from_here, _ = _sums_above(values_ptr, fill, lo, hi, low - 1, largest, inverse, BLOCK)
        least = _of_key(low.to(tl.int32))
        own = tl.maximum(_units(least, largest, inverse), 1)
        ties = tl.minimum(places - above, (room - weight + own - 1) // own)
        if from_here - above > ties:  # of equal logits the first columns
            begin, end = tl.zeros([], tl.int64), last
            while begin < end:
                middle = (begin + end) >> 1
                found = tl.zeros([], tl.int64)
                for start in range(0, fill, BLOCK):
                    index = start + tl.arange(0, BLOCK)
                    value = tl.load(values_ptr + index, mask=index < fill, other=float("-inf")).to(tl.float32)
                    column = tl.load(listed_at_ptr + row * CAPACITY + index, mask=(index < fill) & (not whole), other=0)
                    column = tl.where(whole, index, column)
                    tie = (index < fill) & (value == least) & (column <= middle)
                    found += tl.sum(tie.to(tl.int64), axis=0)
                begin, end = tl.where(found >= ties, begin, middle + 1), tl.where(found >= ties, middle, end)
            last = begin
    tl.store(least_ptr + row, least)
    tl.store(last_ptr + row, last)


@TritonKernel
def _sums_above(
    values_ptr: tl.tensor,
    size: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    key: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How many values within the bracket have larger keys, and their weight."""
    count, weight = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + index, mask=index < size, other=float("-inf")).to(tl.float32)
        above = (index < size) & (value >= lo) & (value < hi) & (_key(value) > key)
        count += tl.sum(above.to(tl.int64), axis=0)
        weight += tl.sum(tl.where(above, _units(value, largest, inverse), 0), axis=0)
    return count, weight


@TritonKernel
def _units(value: tl.tensor, largest: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """A weight in units of 2^-40."""
    return (tl.exp((value - largest) * inverse) * 1099511627776.0).to(tl.int64)


@TritonKernel
def _count_above(
    logits: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    lo: tl.tensor,
    top: tl.tensor,
    spread: tl.tensor,
    pivots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    PIVOTS: tl.constexpr,
) -> None:
    """Columns from each pivot on, and their weight. The first pivot is lo; the others are evenly below `top`."""
    weights = tl.exp((logits - largest) * inverse)
    for j in tl.static_range(PIVOTS):
        pivot = lo
        if j > 0:
            pivot = tl.maximum(top - spread * (1 - j / PIVOTS), lo)
        above = logits >= pivot
        tl.store(counts_ptr + j, tl.sum(above.to(tl.int32), axis=0))
        tl.store(masses_ptr + j, tl.sum(tl.where(above, weights, 0.0), axis=0))
        if tl.program_id(1) == 0:
            tl.store(pivots_ptr + j, pivot)


@TritonKernel
def _narrowed(
    lo: tl.tensor,
    hi: tl.tensor,
    count: tl.tensor,
    mass: tl.tensor,
    target: tl.tensor,
    top_k: tl.tensor,
    num_parts: int,
    pivots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    PARTS: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The bracket from the last pivot that does, its columns being as many or as heavy as asked for, to the next.

    Nothing is between if not even the first pivot does: all from there on is kept.
    """
    pivot, part = tl.arange(0, PIVOTS), tl.arange(0, PARTS)
    place = part[:, None] * PIVOTS + pivot[None, :]
    there = (part < num_parts)[:, None]
    counts = tl.sum(tl.load(counts_ptr + place, mask=there, other=0), axis=0).to(tl.float64)
    masses = tl.sum(tl.load(masses_ptr + place, mask=there, other=0.0).to(tl.float64), axis=0)
    pivots = tl.load(pivots_ptr + pivot)
    does = (counts >= top_k) | (masses >= target)
    before = tl.min(tl.where(does, counts, float("inf")), axis=0)
    new_lo = tl.maximum(lo, tl.max(tl.where(does, pivots, float("-inf")), axis=0))
    new_hi = tl.minimum(hi, tl.min(tl.where(does, float("inf"), pivots), axis=0))
    new_count = tl.maximum(count, tl.max(tl.where(does, 0.0, counts), axis=0))
    new_mass = tl.maximum(mass, tl.max(tl.where(does, 0.0, masses), axis=0))
    settled = before == float("inf")
    inside = tl.where(settled, 0.0, before - new_count)
    return tl.where(settled, lo, new_lo), tl.where(settled, hi, new_hi), new_count, new_mass, inside


@TritonKernel
def _load_bracket(bracket_ptr: tl.tensor) -> tuple[tl.tensor, ...]:
    """lo, hi, columns from hi on, their weight, columns between, largest logit, weight and count that do."""
    lo = tl.load(bracket_ptr).to(tl.float32)
    hi = tl.load(bracket_ptr + 1).to(tl.float32)
    largest = tl.load(bracket_ptr + 5).to(tl.float32)
    count, mass, inside = tl.load(bracket_ptr + 2), tl.load(bracket_ptr + 3), tl.load(bracket_ptr + 4)
    return lo, hi, count, mass, inside, largest, tl.load(bracket_ptr + 6), tl.load(bracket_ptr + 7)


@TritonKernel
def _store_bracket(
    bracket_ptr: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    count: tl.tensor,
    mass: tl.tensor,
    inside: tl.tensor,
    largest: tl.tensor,
    target: tl.tensor,
    top_k: tl.tensor,
) -> None:
    """The inverse of `_load_bracket`."""
    tl.store(bracket_ptr, lo)
    tl.store(bracket_ptr + 1, hi)
    tl.store(bracket_ptr + 2, count)
    tl.store(bracket_ptr + 3, mass)
    tl.store(bracket_ptr + 4, inside)
    tl.store(bracket_ptr + 5, largest)
    tl.store(bracket_ptr + 6, target)
    tl.store(bracket_ptr + 7, top_k)


@TritonKernel
def _inverse(temperature: tl.tensor) -> tl.tensor:
    """1 / T, of float64, in float32."""
    return (1.0 / tl.maximum(temperature, 1e-6)).to(tl.float32)


@TritonKernel
def _at_least(bound: tl.tensor) -> tl.tensor:
    """The least float32 that is not below a float64 bound."""
    near = bound.to(tl.float32)
    return tl.where(near.to(tl.float64) < bound, _after(near), near)


@TritonKernel
def _after(value: tl.tensor) -> tl.tensor:
    """The next float32."""
    return _of_key(_key(value) + 1)


@TritonKernel
def _key(value: tl.tensor) -> tl.tensor:
    """Map float32 to integers with the same order; -0 equals 0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@TritonKernel
def _of_key(key: tl.tensor) -> tl.tensor:
    """The inverse of `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
