"""The table of decode attention's shares under the interpreter: the reference's, and what it promises."""

import itertools

import pytest
import torch
from overlap_spec_kernels.attention.decode_shares import Division, _decode_shares_triton, decode_shares_reference

LENGTHS = {
    "equal": [300] * 6,
    "one long": [500] * 8 + [40_000] + [0] * 7,
    "none": [0] * 5,
    "two long": [1000] * 100 + [60_000] * 2,
    "a batch of two": [3, 9000],
    "at random": torch.randint(5000, (33,), generator=torch.Generator().manual_seed(0)).tolist(),
}
AT_ONCE = 66


def table(lengths: list[int], at_once: int = AT_ONCE, min_keys: int = 128) -> tuple[list[tuple[int, ...]], Division]:
    """(request, split, splits) of each entry; the kernel's are the reference's."""
    equal = max(at_once // len(lengths), 1)
    num_shares = equal * len(lengths) if equal > 1 else len(lengths) + at_once // 2
    division = Division(num_shares, at_once, min_keys)
    on_device = torch.tensor(lengths)
    shares = _decode_shares_triton(on_device, division)
    assert torch.equal(shares, decode_shares_reference(on_device, division))
    return [(entry >> 32, entry >> 16 & 65535, entry & 65535) for entry in shares.tolist()], division


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_split_of_every_request_is_some_entry(lengths: list[int]) -> None:
    entries, _ = table(lengths)
    used = [entry for entry in entries if entry[2]]
    assert entries[len(used) :] == [(0, 0, 0)] * (len(entries) - len(used))
    splits = {request: count for request, _, count in used}
    every = itertools.chain.from_iterable([(request, split) for split in range(splits[request])] for request in splits)
    assert sorted(used) == [(request, split, splits[request]) for request, split in sorted(every)]
    assert set(splits) == set(range(len(lengths)))
    in_order = [lengths[request] for request, *_ in used]
    assert in_order == sorted(in_order, reverse=True)
    assert all(entry[1] == previous[1] + 1 for previous, entry in zip(used, used[1:], strict=False) if entry[1])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_scratch_holds_the_splits(lengths: list[int]) -> None:
    """As many as run at once: those of requests with several splits are the first entries."""
    entries, division = table(lengths)
    assert all(count < 2 for *_, count in entries[min(division.num_at_once, 2 * (len(entries) - len(lengths))) :])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_no_piece_is_much_longer_than_it_must_be(lengths: list[int]) -> None:
    entries, division = table(lengths)
    longest = max(lengths[request] / count for request, _, count in entries if count)
    share = sum(lengths) / AT_ONCE
    assert longest <= max(2.1 * share, division.min_keys)
    equal = max(AT_ONCE // len(lengths), 1)
    assert longest <= max(max(lengths) / equal, division.min_keys)  # no more than without a table


@pytest.mark.slow_but_every(7)
@pytest.mark.parametrize("length", [129, 300, 1000, 1001, 30_011])
@pytest.mark.parametrize("num_requests", [2, 3, 5, 16, 32, 64])
def test_equal_lengths_get_what_they_get_without_a_table(num_requests: int, length: int) -> None:
    entries, _ = table([length] * num_requests)
    expected = min(max(AT_ONCE // num_requests, 1), -(-length // 128))
    assert [count for *_, count in entries if count] == [expected] * (expected * num_requests)
