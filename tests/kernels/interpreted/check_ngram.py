"""The operations on n-grams under the interpreter: what their references find, and leave in the log, token by token."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import allocate_log, with_slots
from overlap_spec_kernels.ngram._ngram_merge_kernel import merge_on_device
from overlap_spec_kernels.ngram.ngram_absorb import _ngram_absorb_triton, ngram_absorb_reference
from overlap_spec_kernels.ngram.ngram_lookahead import _ngram_lookahead_triton, ngram_lookahead_reference
from overlap_spec_kernels.ngram.ngram_match import _ngram_match_triton, ngram_match_reference
from overlap_spec_kernels.ngram.ngram_merge import ngram_merge_reference
from overlap_spec_kernels.window.store_tokens import _store_tokens_triton, store_tokens_reference
from support.ngram_inputs import CASES, LIMITS, NgramOps

REFERENCES = NgramOps(
    store_tokens_reference,
    ngram_absorb_reference,
    ngram_match_reference,
    ngram_merge_reference,
    ngram_lookahead_reference,
)
KERNELS = NgramOps(
    _store_tokens_triton, _ngram_absorb_triton, _ngram_match_triton, merge_on_device, _ngram_lookahead_triton
)


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_play_as_their_references_do(name: str) -> None:
    case = replace(CASES[name], num_steps=4)
    played = zip(case.play(KERNELS), case.play(REFERENCES), strict=True)
    for number, (actual, expected) in enumerate(played):
        assert torch.equal(actual, expected), f"output {number}"


def test_kernels_keep_owners_apart() -> None:
    """As the references do, also where every entry of the index leads to what one of three owners said."""
    case = replace(CASES["three owners in bands of their own"], num_steps=3, most=40, num_guesses=4)
    played = zip(case.play(KERNELS), case.play(REFERENCES), strict=True)
    for number, (actual, expected) in enumerate(played):
        assert torch.equal(actual, expected), f"output {number}"


def test_no_hash_leads_the_kernel_to_what_another_owner_said() -> None:
    limits, slots, lengths = LIMITS["chains"], torch.tensor([0, 1, 2]), torch.tensor([3, 1, 1])
    log = with_slots(allocate_log(1 << 12, torch.device("cpu")), 4)
    log.owner[:3] = torch.tensor([1, 2, 1])
    pool, table = torch.zeros(64, dtype=torch.int32), torch.tensor([[1], [2], [3]], dtype=torch.int32)
    for row, tokens in enumerate(([7, 8, 9, 10], [5, 8], [6, 8])):
        pool[16 * (row + 1) : 16 * (row + 1) + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    _ngram_absorb_triton(log, limits, pool, table, 16, slots, 0 * lengths, lengths, 3, 16)
    log.places.fill_(limits.context + 2)  # where owner 1 has said 8
    keys = _ngram_match_triton(pool, table, 16, lengths, limits)
    tokens = merge_on_device(keys, log, limits, pool, table, 16, slots, lengths, 2)[0]
    assert tokens[:, 1].tolist() == [-1, -1] and tokens[:, 2].tolist() == [9, 10]
