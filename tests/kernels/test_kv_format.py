"""Values of a cache of 8 bits, by hand."""

import pytest
import torch
from overlap_spec_kernels import decode_attention, move_cache_rows
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.kv_format import KVScales, stored, write_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_scaled_clamped_and_rounded_to_even(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.125, 2.375, -2.125, 300.0, 5000.0, -5000.0, 0.0, torch.inf, torch.nan], dtype=dtype)
    found = stored(x, E4M3, 2.0).float()
    expected = [0.5, 1.0, 1.25, -1.0, 144.0, 448.0, -448.0, 0.0, 448.0, torch.nan]  # steps of 1/8 from 1 on
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True, rtol=0, atol=0)
    largest = stored(torch.tensor([6e4, -6e4], dtype=dtype), E5M2, 1.0).float()
    assert largest.tolist() == [57344.0, -57344.0]
    assert stored(torch.tensor([1e9, -1e9]), E5M2, 1.0).float().tolist() == [57344.0, -57344.0], "not infinite"


def test_rows_of_the_models_dtype_are_written_as_they_are() -> None:
    cache, x = torch.zeros(2, 4, 1, 2), torch.randn(2, 1, 2) * 1e6
    write_rows(cache, torch.tensor([5, 2]), x, 3.0)
    assert torch.equal(cache.view(8, 1, 2)[[5, 2]], x)


def test_rows_are_moved_bit_by_bit() -> None:
    k = torch.arange(64, dtype=torch.uint8).view(1, 2, 4, 2, 4)  # no bit pattern among them is NaN
    v = k + 64
    move_cache_rows(k.view(E4M3), v.view(E5M2).view(E4M3), torch.tensor([[6, 5]]), torch.tensor([[5, 2]]))
    rows = k.flatten(0, 2)
    assert rows[5].flatten().tolist() == list(range(48, 56)) and rows[2].flatten().tolist() == list(range(40, 48))
    assert v.flatten(0, 2)[5].flatten().tolist() == list(range(112, 120))


def test_a_row_attends_to_its_own_rounded_value() -> None:
    """One row, and no key before it: the output is its own value, as the cache has it."""
    k, v = (torch.zeros(1, 4, 1, 4, dtype=E4M3) for _ in range(2))
    qkv = torch.tensor([[0.0] * 8 + [1.3, -0.7, 1e6, 0.01]])
    place, cos_sin = torch.zeros(1, dtype=torch.int64), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    scratch = DecodeScratch.allocate(4, torch.device("cpu"))
    out = decode_attention(qkv, cos_sin, place, place.int()[None], k, v, scratch, 1.0, scales=KVScales(1.0, 0.5))
    assert out.tolist() == [[1.25, -0.6875, 224.0, 0.009765625]]  # 2.5, -1.375, 448 and 5 / 256 in halves
    assert torch.equal(out.view(4), v[0, 0, 0].float() * 0.5)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_caches_of_two_formats_are_refused(name: str) -> None:
    caches = {"k_cache": torch.zeros(1, 4, 1, 4, dtype=E4M3), "v_cache": torch.zeros(1, 4, 1, 4, dtype=E4M3)}
    caches[name] = caches[name].to(torch.float64 if name == "k_cache" else E5M2)
    place = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=name):
        decode_attention(
            torch.zeros(1, 12), torch.zeros(1, 4), place, place.int()[None], **caches,
            scratch=DecodeScratch.allocate(4, torch.device("cpu")), scale=1.0,
        )  # fmt: skip
