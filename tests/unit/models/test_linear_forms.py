"""Every form of a linear computes the same, and a whole model takes one without losing what its parts share."""

from dataclasses import dataclass

import pytest
import torch

from overlap_spec.models.layers.linear import DenseLinear, Linear, make_linear
from overlap_spec.models.layers.linear_forms import FORMS, Form, FormedLinear, in_form, linears_of

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@dataclass(frozen=True)
class Model:
    layers: tuple[DenseLinear, ...]
    head: DenseLinear
    embedding: torch.Tensor
    size: int = 3


def tiny_model() -> Model:
    torch.manual_seed(0)
    embedding = torch.randn(40, 32)
    return Model(
        tuple(make_linear(torch.randn(48, 32), torch.randn(48)) for _ in range(2)), Linear(embedding), embedding
    )


@every_form
@pytest.mark.parametrize("num_rows", [1, 2, 4, 7])
def test_every_form_is_the_linear(form: Form, num_rows: int) -> None:
    model, x = tiny_model(), torch.randn(num_rows, 32)
    formed = in_form(model, form, form)
    for linear, old in zip(linears_of(formed), linears_of(model), strict=True):
        assert isinstance(linear, FormedLinear)
        torch.testing.assert_close(linear(x), old(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(linear.matrix(), old.matrix())


def test_heads_have_a_form_of_their_own_and_the_rest_stays() -> None:
    model = tiny_model()
    formed = in_form(model, FORMS["x @ weight.T"], FORMS["packed"])
    assert [linear.form.name for linear in formed.layers] == ["x @ weight.T"] * 2
    assert formed.head.form.name == "packed"
    assert formed.embedding is model.embedding and formed.size == 3


def test_what_is_shared_stays_shared() -> None:
    shared = make_linear(torch.randn(48, 32))
    first, second = in_form((shared, shared), FORMS["packed"], FORMS["packed"])
    assert first is second


def test_the_first_rows_of_a_linear_are_another_linear() -> None:
    whole, form = Linear(torch.randn(48, 32)), FORMS["weight @ x.T"]
    formed, first = in_form((whole, whole.rows(slice(40))), form, form)
    assert (formed.out_features, first.out_features) == (48, 40)


def test_what_has_no_linears_is_not_touched() -> None:
    node = (1, "two", torch.zeros(3))
    assert in_form(node, FORMS["packed"], FORMS["packed"]) is node
