"""Which form a sum over GPUs has. The sums themselves: tests/gpu."""

import os

import pytest

from overlap_spec.config import refuse_multicast
from overlap_spec.models.layers.parallel import CAPACITY, GATHER_LIMIT, LIMITS, Form, form_of


def test_ours_are_for_few_bytes_and_nccl_for_many() -> None:
    for ranks, (one_shot, two_shot) in LIMITS.items():
        assert form_of(one_shot, ranks) is Form.ONE_SHOT
        assert form_of(two_shot + 1, ranks) is Form.NCCL
        assert max(one_shot, two_shot, GATHER_LIMIT) <= CAPACITY, "an operand that its buffer does not hold"
    assert form_of(LIMITS[4][0] + 1, 4) is Form.TWO_SHOT


def test_multicast_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.setenv(name, "2")
    refuse_multicast()
    assert (os.environ["NCCL_NVLS_ENABLE"], os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
