"""The kernel of int8 weights under Triton's interpreter, at sizes that do not fill its blocks."""

import pytest
import torch
from support import int8_weight
from support.int8_weight import Int8Weight, int8_linear_reference


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_weight, "runs_triton", lambda tensor: True)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "size_n", "size_k"), [(1, 32, 64), (3, 40, 100), (17, 33, 576), (64, 96, 130), (130, 20, 72)]
)
def test_it_is_the_reference(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    values = torch.randint(-127, 128, (size_n, size_k), dtype=torch.int8)
    weight = Int8Weight(values, torch.rand(size_n) / size_k, dtype)
    x = torch.randn(rows, size_k + 8).to(dtype)[:, :size_k]
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-9, "atol": 2**-9}
    for actual, kind in ((weight.product(x), dtype), (weight.logits(x), torch.float32)):
        assert actual.dtype == kind
        torch.testing.assert_close(actual, int8_linear_reference(x, values, weight.scales, kind), **close)
