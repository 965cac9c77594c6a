"""The references of fused linears, which a CPU runs, against their definitions; refused arguments."""

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import DenseWeight, Norm, Normed, fused_linear, linear_add, linear_argmax, linear_logits

F64 = torch.float64
X, WEIGHT, RESIDUAL = torch.randn(3, 8, dtype=F64), torch.randn(6, 8, dtype=F64), torch.randn(3, 6, dtype=F64)
NORM = Norm(torch.rand(6, dtype=F64) + 0.5, 1e-5)


def test_a_sum_is_handed_to_its_norm() -> None:
    stream = linear_add(X, DenseWeight(WEIGHT), RESIDUAL, NORM)
    torch.testing.assert_close(stream.values, RESIDUAL + X @ WEIGHT.t())
    torch.testing.assert_close(stream.normalised(), F.rms_norm(stream.values, (6,), NORM.weight, NORM.eps))


def test_a_sum_is_written_over_a_residual_that_may_be_taken() -> None:
    own = RESIDUAL.clone()
    taken, kept = (linear_add(X, DenseWeight(WEIGHT), own, NORM, take) for take in (True, False))
    assert taken.values is own and kept.values is not own
    torch.testing.assert_close(own, RESIDUAL + X @ WEIGHT.t())
    torch.testing.assert_close(taken.normalised(), F.rms_norm(own, (6,), NORM.weight, NORM.eps))


def test_a_divided_norm_is_a_norm() -> None:
    """The weight by who writes, the scale by who reads."""
    values = torch.randn(3, 6, dtype=F64)
    squares = values.square().view(3, 2, 3).sum(2).t()
    divided = Normed(values, values * NORM.weight, squares, NORM.eps)
    whole = Normed(values, F.rms_norm(values, (6,), NORM.weight, NORM.eps))
    torch.testing.assert_close(divided.normalised(), whole.normalised())
    after = torch.randn(4, 6, dtype=F64)
    for gated in (False, True):
        torch.testing.assert_close(
            fused_linear(divided, DenseWeight(after), gated), fused_linear(whole, DenseWeight(after), gated)
        )
    torch.testing.assert_close(linear_logits(divided, DenseWeight(after)), linear_logits(whole, DenseWeight(after)))


def test_the_gate_is_the_first_half() -> None:
    gate, up = X @ WEIGHT[:3].t(), X @ WEIGHT[3:].t()
    torch.testing.assert_close(fused_linear(X, DenseWeight(WEIGHT), gated=True), F.silu(gate) * up)


def test_a_bias_is_added_to_the_product() -> None:
    bias = torch.randn(6, dtype=F64)
    weight, y = DenseWeight(WEIGHT, bias), X @ WEIGHT.t() + bias
    torch.testing.assert_close(fused_linear(X, weight), y)
    torch.testing.assert_close(linear_logits(X, weight), y)
    torch.testing.assert_close(fused_linear(X, weight, gated=True), F.silu(y[:, :3]) * y[:, 3:])
    assert torch.equal(linear_argmax(X, weight), y.argmax(1))
    for take in (True, False):
        torch.testing.assert_close(linear_add(X, weight, RESIDUAL.clone(), NORM, take).values, RESIDUAL + y)


def test_maxima_are_looked_up() -> None:
    columns = (X @ WEIGHT.t()).argmax(1)
    assert torch.equal(linear_argmax(X, DenseWeight(WEIGHT)), columns)
    ids = torch.tensor([50, 40, 30, 20, 10, 0])
    assert torch.equal(linear_argmax(X, DenseWeight(WEIGHT), ids), ids[columns])


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: fused_linear(X[0], DenseWeight(WEIGHT))),
        ("weight", lambda: fused_linear(X, DenseWeight(WEIGHT.t()))),
        ("weight", lambda: fused_linear(X, DenseWeight(WEIGHT.float()))),
        ("weight", lambda: fused_linear(X, DenseWeight(WEIGHT[:5]), gated=True)),
        ("bias", lambda: fused_linear(X, DenseWeight(WEIGHT, WEIGHT[:5, 0].clone()))),
        ("bias", lambda: fused_linear(X, DenseWeight(WEIGHT, WEIGHT[:, 0]))),
        ("bias", lambda: fused_linear(X, DenseWeight(WEIGHT, torch.ones(6)))),
        ("residual", lambda: linear_add(X, DenseWeight(WEIGHT), RESIDUAL[:2], NORM)),
        ("norm", lambda: linear_add(X, DenseWeight(WEIGHT), RESIDUAL, Norm(torch.ones(5, dtype=F64), 1e-5))),
        ("ids", lambda: linear_argmax(X, DenseWeight(WEIGHT), torch.arange(5))),
    ],
)
def test_refused_arguments_are_named(argument: str, call) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        call()
