"""The noise is a pure function of its key, and it is Gumbel noise."""

import math

import torch
from overlap_spec_kernels import gumbel, mix64
from support.sampling_oracle import MASK, gumbel as gumbel_by_hand, mix64 as mix64_by_hand


def test_mix64_wraps_as_unsigned_arithmetic_does() -> None:
    values = [0, 1, 2, 12345, -1, -(2**63), 2**63 - 1, 0x1234567890ABCDEF]
    mixed = mix64(torch.tensor(values)).tolist()
    assert [m & MASK for m in mixed] == [mix64_by_hand(v) for v in values]


def test_noise_is_the_written_out_one() -> None:
    keys = [(0, 0, 0), (7, 3, 127), (1 << 40, 17, 49151), ((1 << 63) - 1, 131071, 1), (-5, 2, 3)]
    for seed, position, token in keys:
        noise = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token])).item()
        assert math.isclose(noise, gumbel_by_hand(seed, position, token), rel_tol=1e-12)


def test_a_value_depends_only_on_its_own_key() -> None:
    ids = torch.arange(50)
    whole = gumbel(torch.tensor([7, 7, 9]), torch.tensor([3, 4, 3]), ids)
    for row, (seed, position) in enumerate([(7, 3), (7, 4), (9, 3)]):
        alone = gumbel(torch.tensor([seed]), torch.tensor([position]), ids[20:])
        assert torch.equal(whole[row, 20:], alone[0])
    assert len(whole.unique()) == 150  # another seed or position: other noise


def test_mean_and_variance_are_gumbel() -> None:
    noise = gumbel(torch.arange(100), torch.arange(100), torch.arange(5000))
    assert abs(noise.mean().item() - 0.5772156649) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    assert torch.isfinite(noise).all()


def test_neighbouring_keys_are_uncorrelated() -> None:
    ids = torch.arange(20000)
    noise = gumbel(torch.tensor([5, 5, 6]), torch.tensor([10, 11, 10]), ids)
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation[~torch.eye(3, dtype=torch.bool)]
    assert off_diagonal.abs().max() < 0.03
    assert torch.corrcoef(torch.stack((noise[0, :-1], noise[0, 1:])))[0, 1].abs() < 0.03
