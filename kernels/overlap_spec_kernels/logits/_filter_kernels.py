"""The Triton functions of `filter_cutoff`, in the order of their launches.

    part_stats      (row, part)   the largest logit of each quarter of a part, the part's sum of weights
    first_bracket   (row)         a bracket of the cutoff by those, and pivots in it; whether the drawn column is kept,
                                  after which the other kernels leave the row alone
    count_above     (row, part)   weight, and number if that matters, of the columns from each pivot on
    narrow_bracket  (row)         the bracket between two pivots, and pivots in that
    count_above, narrow_bracket   twice more, where many columns are between
    gather_bracket  (row, part)   the columns of the bracket, into one list for each row
    select_cutoff   (row)         the cutoff, by bisection over the list

A weight is exp((logit - largest) / T). A bracket is [lo, hi): columns from hi on are kept, those below lo are dropped.
Parts are the same for any number of rows, so that no sum depends on that.
"""

from __future__ import annotations

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel


@TritonKernel.with_options(do_not_specialize=("rows",))
def part_stats_kernel(
    logits_ptr: tl.tensor, temperature_ptr: tl.tensor, drawn_ptr: tl.tensor, state_ptr: tl.tensor,
    maxima_ptr: tl.tensor, sums_ptr: tl.tensor, before_ptr: tl.tensor,
    rows: int, columns: int, temperature_stride: int,
    QUARTER: tl.constexpr, DRAWN: tl.constexpr, AGAIN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Maxima of quarters; the sum of exp((logit - the part's largest) / T), and of those before the drawn column."""
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    quarter = tl.arange(0, 4)
    column = tl.program_id(1) * (4 * QUARTER) + quarter[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row // rows * temperature_stride)
    if (temperature > 0) & _is_open(state_ptr, row, AGAIN):
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=float("-inf"))
        logits = logits.to(tl.float32)
        maxima = tl.max(logits, axis=1)
        largest = tl.maximum(tl.max(maxima, axis=0), -3.0e38)  # finite even if all logits are -inf
        weights = tl.exp((logits - largest) * _inverse(temperature))
        tl.store(maxima_ptr + part * 4 + quarter, maxima)
        tl.store(sums_ptr + part, tl.sum(tl.sum(weights, axis=1), axis=0))
        if DRAWN:
            drawn, own = _drawn_of(logits_ptr, drawn_ptr, row, columns)
            before = (logits > own) | ((logits == own) & (column < drawn))
            tl.store(before_ptr + part * 2, tl.sum(tl.sum(tl.where(before, weights, 0.0), axis=1), axis=0))
            tl.store(before_ptr + part * 2 + 1, tl.sum(tl.sum(before.to(tl.float32), axis=1), axis=0))


@TritonKernel.with_options(do_not_specialize=("rows",))
def first_bracket_kernel(
    logits_ptr: tl.tensor, temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, min_p_ptr: tl.tensor,
    drawn_ptr: tl.tensor, maxima_ptr: tl.tensor, sums_ptr: tl.tensor, before_ptr: tl.tensor, brackets_ptr: tl.tensor,
    pivots_ptr: tl.tensor, fill_ptr: tl.tensor, state_ptr: tl.tensor, least_ptr: tl.tensor, last_ptr: tl.tensor,
    rows: int, columns: int, temperature_stride: int, top_k_stride: int, top_p_stride: int, min_p_stride: int,
    num_parts: int,
    PARTS: tl.constexpr, PIVOTS: tl.constexpr, OPEN: tl.constexpr, SEARCHED: tl.constexpr, SETTLED: tl.constexpr,
    DRAWN: tl.constexpr, AGAIN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A slot without filters, or greedy, keeps everything. min_p is a bound; a small top_k needs no pivots.

    Where the drawn column is not kept, `least` and `last` leave those before it to be drawn from.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = row // rows
    wait_for_inputs(PDL)
    if _is_open(state_ptr, row, AGAIN):
        temperature = tl.load(temperature_ptr + slot * temperature_stride)
        top_k = tl.load(top_k_ptr + slot * top_k_stride)
        top_p = tl.load(top_p_ptr + slot * top_p_stride)
        min_p = tl.load(min_p_ptr + slot * min_p_stride)
        limited = (temperature > 0) & ((top_k < columns) | (top_p < 1))
        lo, hi, largest, spread = float("-inf"), float("inf"), 0.0, 0.0
        drawn, own = tl.zeros([], tl.int64), tl.zeros([], tl.float32)
        if DRAWN:
            drawn, own = _drawn_of(logits_ptr, drawn_ptr, row, columns)
        target, few, state = tl.zeros([], tl.float64), tl.zeros([], tl.int32), tl.full([], SETTLED, tl.int32)
        if (temperature > 0) & ((top_k < columns) | (top_p < 1) | (min_p > 0)):
            group, part = tl.arange(0, 4 * PARTS), tl.arange(0, PARTS)
            there = group < 4 * num_parts
            maxima = tl.load(maxima_ptr + row * num_parts * 4 + group, mask=there, other=float("-inf"))
            of_parts = tl.max(tl.reshape(maxima, [PARTS, 4]), axis=1)
            sums = tl.load(sums_ptr + row * num_parts + part, mask=part < num_parts, other=0.0)
            largest = tl.max(maxima, axis=0)
            total = tl.sum(sums * tl.exp((of_parts - largest) * _inverse(temperature)), axis=0).to(tl.float64)
            target = tl.where(top_p < 1, top_p * total, float("inf")).to(tl.float64)
            if min_p > 0:
                lo = _at_least(largest.to(tl.float64) + temperature * tl.log(min_p))
            if DRAWN:
                scales = tl.exp((of_parts - largest) * _inverse(temperature))
                mass, count = _sum_before(before_ptr + row * num_parts * 2, scales, num_parts, PARTS)
                is_kept = (mass < target) & (count < top_k) & (own >= lo)
                state = tl.where(drawn < 0, SEARCHED, tl.where(is_kept, SETTLED, OPEN)).to(tl.int32)
            if top_p < 1:  # all that is below weighs less than what may be dropped
                below = tl.log(columns / (tl.maximum(1 - top_p, 1e-30) * total)) + 1e-3
                lo = tl.maximum(lo, (largest.to(tl.float64) - temperature * below).to(tl.float32))
            few = (top_k <= tl.sum((maxima > float("-inf")).to(tl.int32), axis=0)).to(tl.int32)
            if few > 0:  # so many columns are as large
                better = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), axis=1)
                lo = tl.maximum(lo, tl.min(tl.where(better < top_k, maxima, float("inf")), axis=0))
            hi = _after(largest)
            smallest = tl.min(tl.where(there, maxima, float("inf")), axis=0)
            spread = tl.where(lo > float("-inf"), largest - lo, tl.minimum(4 * (largest - smallest), 3.0e38) + 1e-3)
        if DRAWN:
            limited &= state < SETTLED
            tl.store(state_ptr + row, state)
            tl.store(least_ptr + row, own)
            tl.store(last_ptr + row, drawn - 1)
        is_open = limited.to(tl.float64)
        counting = tl.where(limited & (few == 0), tl.where(top_k < columns, 2.0, 1.0), 0.0)
        bracket_ptr = brackets_ptr + row * 16
        _store_bracket(bracket_ptr, lo, hi, 0, 0.0, is_open, counting)
        _store_bounds(bracket_ptr, largest, target, tl.where(top_k < columns, top_k, columns), _inverse(temperature))
        tl.store(fill_ptr + row, 0)
        _place_pivots(pivots_ptr + row * PIVOTS, lo, largest, spread, PIVOTS)


@TritonKernel.with_options(do_not_specialize=("rows",))
def count_above_kernel(
    logits_ptr: tl.tensor, temperature_ptr: tl.tensor, brackets_ptr: tl.tensor, pivots_ptr: tl.tensor,
    counts_ptr: tl.tensor, masses_ptr: tl.tensor, rows: int, columns: int, temperature_stride: int, PART: tl.constexpr,
    PIVOTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """How much the part's columns from each pivot on weigh; how many they are, for rows with a large top_k."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    counting = tl.load(brackets_ptr + row * 16 + 5)
    if counting > 0:
        largest = tl.load(brackets_ptr + row * 16 + 6).to(tl.float32)
        inverse = _inverse(tl.load(temperature_ptr + row // rows * temperature_stride))
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=float("-inf"))
        weights = tl.exp((logits.to(tl.float32) - largest) * inverse)
        place = (row * tl.num_programs(1) + tl.program_id(1)) * PIVOTS
        for j in tl.static_range(PIVOTS):
            pivot = tl.load(pivots_ptr + row * PIVOTS + j)
            tl.store(masses_ptr + place + j, tl.sum(tl.where(logits >= pivot, weights, 0.0), axis=0))
        if counting > 1:
            for j in tl.static_range(PIVOTS):
                pivot = tl.load(pivots_ptr + row * PIVOTS + j)
                tl.store(counts_ptr + place + j, tl.sum(tl.where(logits >= pivot, 1.0, 0.0), axis=0))


@TritonKernel
def narrow_bracket_kernel(
    brackets_ptr: tl.tensor, pivots_ptr: tl.tensor, counts_ptr: tl.tensor, masses_ptr: tl.tensor, num_parts: int,
    FEW: tl.constexpr, PARTS: tl.constexpr, PIVOTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """From the last pivot that does, its columns being as many or as heavy as asked for, to the next.

    Nothing is between if not even the first pivot does: all from there on is kept.
    """
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    bracket_ptr = brackets_ptr + row * 16
    counting = tl.load(bracket_ptr + 5)
    if counting > 0:
        lo, hi, count, mass, largest, target, top_k = _load_bracket(bracket_ptr)
        pivot, part = tl.arange(0, PIVOTS), tl.arange(0, PARTS)
        place = (row * num_parts + part[:, None]) * PIVOTS + pivot[None, :]
        there = (part < num_parts)[:, None]
        num_counted = tl.where(counting > 1, num_parts, 0)
        counts = tl.load(counts_ptr + place, mask=(part < num_counted)[:, None], other=0.0).to(tl.float64)
        counts = tl.sum(counts, axis=0)
        masses = tl.sum(tl.load(masses_ptr + place, mask=there, other=0.0).to(tl.float64), axis=0)
        pivots = tl.load(pivots_ptr + row * PIVOTS + pivot)
        does = (counts >= top_k) | (masses >= target)
        if tl.max(does.to(tl.int32), axis=0) > 0:
            heaviest = tl.min(tl.where(does, masses, float("inf")), axis=0)
            lo = tl.maximum(lo, tl.max(tl.where(does, pivots, float("-inf")), axis=0))
            hi = tl.minimum(hi, tl.min(tl.where(does, float("inf"), pivots), axis=0))
            count = tl.maximum(count, tl.max(tl.where(does, 0.0, counts), axis=0))
            mass = tl.maximum(mass, tl.max(tl.where(does, 0.0, masses), axis=0))
            # What is between weighs so much, and each column of it at least as much as one at lo.
            lightest = tl.exp((lo - largest) * tl.load(bracket_ptr + 9).to(tl.float32)).to(tl.float64)
            more = tl.where(heaviest - mass <= FEW * lightest, 0.0, counting)
            _store_bracket(bracket_ptr, lo, hi, count, mass, 1.0, more)
            spread = tl.where(lo > float("-inf"), hi - lo, 4 * (largest - hi) + 1e-3)
            _place_pivots(pivots_ptr + row * PIVOTS, lo, hi, spread, PIVOTS)
        else:
            _store_bracket(bracket_ptr, lo, hi, count, mass, 0.0, 0.0)


@TritonKernel
def gather_bracket_kernel(
    logits_ptr: tl.tensor, brackets_ptr: tl.tensor, fill_ptr: tl.tensor, listed_ptr: tl.tensor,
    listed_at_ptr: tl.tensor, columns: int, CAPACITY: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The list is in no order, and ends where it is full; then `fill` is more than it holds."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    bracket_ptr = brackets_ptr + row * 16
    is_full = tl.load(fill_ptr + row) > CAPACITY
    if (tl.load(bracket_ptr + 4) > 0) & (is_full == 0):
        lo, hi = tl.load(bracket_ptr).to(tl.float32), tl.load(bracket_ptr + 1).to(tl.float32)
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=float("-inf"))
        between = (logits >= lo) & (logits < hi) & (column < columns)
        place = tl.atomic_add(fill_ptr + row + tl.zeros_like(column), 1, mask=between, sem="relaxed")
        listed = between & (place < CAPACITY)
        tl.store(listed_ptr + row * CAPACITY + place, logits, mask=listed)
        tl.store(listed_at_ptr + row * CAPACITY + place, column, mask=listed)


@TritonKernel.with_options(do_not_specialize=("rows",))
def select_cutoff_kernel(
    logits_ptr: tl.tensor, temperature_ptr: tl.tensor, brackets_ptr: tl.tensor, fill_ptr: tl.tensor,
    listed_ptr: tl.tensor, listed_at_ptr: tl.tensor, least_ptr: tl.tensor, last_ptr: tl.tensor,
    rows: int, columns: int, temperature_stride: int,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Bisect over the list. Sums of weights are integers, so that its order does not matter.

    If the list does not hold the bracket, the whole row takes its place: slow, but only logits that are alike do that.
    """
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    bracket_ptr = brackets_ptr + row * 16
    lo, hi, count, mass, largest, target, top_k = _load_bracket(bracket_ptr)
    least, last = lo, tl.zeros([], tl.int64) + (columns - 1)
    if tl.load(bracket_ptr + 4) > 0:
        inverse = _inverse(tl.load(temperature_ptr + row // rows * temperature_stride))
        size = tl.load(fill_ptr + row)
        whole = size > CAPACITY
        values_ptr = listed_ptr + row * CAPACITY
        if whole:
            values_ptr = logits_ptr + row * columns
            size = size * 0 + columns
        # A column counts 2^shift and its weight, which is at most 2^bits: both sums in one integer.
        bits, shift = tl.where(whole, 26, 36).to(tl.int64), tl.where(whole, 44, 49).to(tl.int64)
        top = tl.minimum(hi, largest)
        unit = (tl.full([], 1, tl.int64) << bits).to(tl.float32)
        room = (target - mass) / tl.exp((top - largest) * inverse).to(tl.float64) * unit
        room = tl.maximum(tl.minimum(room, 1.0e15).to(tl.int64), 1)
        places, one = (top_k - count).to(tl.int64), tl.full([], 1, tl.int64) << shift
        low, high = _key(lo).to(tl.int64), _key(hi).to(tl.int64) - 1  # `high` keeps all that is above it: nothing
        while low < high:
            middle = (low + high) >> 1
            found = _sum_above(values_ptr, size, lo, hi, middle, top, inverse, unit, one, BLOCK)
            keeps = ((found >> shift) < places) & ((found & (one - 1)) < room)
            low, high = tl.where(keeps, low, middle + 1), tl.where(keeps, middle, high)
        above = _sum_above(values_ptr, size, lo, hi, low, top, inverse, unit, one, BLOCK)
        equal = _sum_above(values_ptr, size, lo, hi, low - 1, top, inverse, unit, one, BLOCK) - above
        least = _of_key(low.to(tl.int32))
        own = tl.maximum((tl.exp((least - top) * inverse) * unit).to(tl.int64), 1)
        ties = tl.minimum(places - (above >> shift), (room - (above & (one - 1)) + own - 1) // own)
        if (equal >> shift) > ties:  # of equal logits the first columns
            begin, end = tl.zeros([], tl.int64), last
            while begin < end:
                middle = (begin + end) >> 1
                until = tl.zeros([BLOCK], tl.int32)
                for start in range(0, size, BLOCK):
                    index = start + tl.arange(0, BLOCK)
                    value = tl.load(values_ptr + index, mask=index < size, other=float("-inf"))
                    column = tl.load(
                        listed_at_ptr + row * CAPACITY + index, mask=(index < size) & (whole == 0), other=0
                    )
                    column = tl.where(whole, index, column)
                    until += ((index < size) & (value == least) & (column <= middle)).to(tl.int32)
                does = tl.sum(until, axis=0) >= ties
                begin, end = tl.where(does, begin, middle + 1), tl.where(does, middle, end)
            last = begin
    tl.store(least_ptr + row, least)
    tl.store(last_ptr + row, last)


@TritonKernel
def _sum_above(
    values_ptr: tl.tensor, size: tl.tensor, lo: tl.tensor, hi: tl.tensor, key: tl.tensor, top: tl.tensor,
    inverse: tl.tensor, unit: tl.tensor, one: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many values within the bracket have larger keys, in units of `one`, and their weights, in units of `unit`."""
    found = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + index, mask=index < size, other=float("-inf"))
        above = (index < size) & (value >= lo) & (value < hi) & (_key(value) > key)
        found += tl.where(above, one + (tl.exp((value - top) * inverse) * unit).to(tl.int64), 0)
    return tl.sum(found, axis=0)


@TritonKernel
def _is_open(state_ptr: tl.tensor, row: tl.tensor, AGAIN: tl.constexpr) -> tl.tensor:
    """Whether the row is looked at. AGAIN: it was before, and may have no column that could be kept."""
    is_open = row >= 0
    if AGAIN:
        is_open = tl.load(state_ptr + row) == 0  # OPEN
    return is_open


@TritonKernel
def _drawn_of(logits_ptr: tl.tensor, drawn_ptr: tl.tensor, row: tl.tensor, columns: int) -> tuple[tl.tensor, tl.tensor]:
    """The row's drawn column, negative if there is none, and its logit."""
    drawn = tl.load(drawn_ptr + row)
    own = tl.load(logits_ptr + row * columns + drawn, mask=drawn >= 0, other=float("inf"))
    return drawn, own.to(tl.float32)


@TritonKernel
def _place_pivots(
    pivots_ptr: tl.tensor, lo: tl.tensor, top: tl.tensor, spread: tl.tensor, PIVOTS: tl.constexpr
) -> None:
    """The first pivot is lo; the others are evenly below `top`."""
    pivot = tl.arange(0, PIVOTS)
    value = tl.maximum(top - spread * (1 - pivot.to(tl.float32) / PIVOTS), lo)
    tl.store(pivots_ptr + pivot, tl.where(pivot == 0, lo, value))


@TritonKernel
def _store_bracket(
    bracket_ptr: tl.tensor, lo: tl.tensor, hi: tl.tensor, count: tl.tensor, mass: tl.tensor, is_open: tl.tensor,
    counting: tl.tensor,
) -> None:  # fmt: skip
    """lo, hi; columns from hi on and their weight; 0: all from lo on is kept; 1: weigh columns, 2: count them too."""
    tl.store(bracket_ptr, lo)
    tl.store(bracket_ptr + 1, hi)
    tl.store(bracket_ptr + 2, count)
    tl.store(bracket_ptr + 3, mass)
    tl.store(bracket_ptr + 4, is_open)
    tl.store(bracket_ptr + 5, counting)


@TritonKernel
def _store_bounds(
    bracket_ptr: tl.tensor, largest: tl.tensor, target: tl.tensor, top_k: tl.tensor, inverse: tl.tensor
) -> None:
    """What no kernel changes: the largest logit; the weight and the count that do; 1 / T."""
    tl.store(bracket_ptr + 6, largest)
    tl.store(bracket_ptr + 7, target)
    tl.store(bracket_ptr + 8, top_k)
    tl.store(bracket_ptr + 9, inverse)


@TritonKernel
def _sum_before(
    before_ptr: tl.tensor, scales: tl.tensor, num_parts: tl.tensor, PARTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The weight and the number of a row's columns before the drawn one. `scales`: of parts' weights."""
    part = tl.arange(0, PARTS)
    masses = tl.load(before_ptr + part * 2, mask=part < num_parts, other=0.0)
    counts = tl.load(before_ptr + part * 2 + 1, mask=part < num_parts, other=0.0)
    return tl.sum(masses * scales, axis=0).to(tl.float64), tl.sum(counts, axis=0)


@TritonKernel
def _load_bracket(bracket_ptr: tl.tensor) -> tuple[tl.tensor, ...]:
    """lo, hi; columns from hi on and their weight; the largest logit; the weight and the count that do."""
    lo, hi = tl.load(bracket_ptr).to(tl.float32), tl.load(bracket_ptr + 1).to(tl.float32)
    count, mass = tl.load(bracket_ptr + 2), tl.load(bracket_ptr + 3)
    largest = tl.load(bracket_ptr + 6).to(tl.float32)
    return lo, hi, count, mass, largest, tl.load(bracket_ptr + 7), tl.load(bracket_ptr + 8)


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
