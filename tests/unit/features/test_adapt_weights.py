"""A copy of a head that is trained, and the head that serves: what becomes of weights."""

from typing import Any

import pytest
import torch
from support.tiny.models import load_tiny_draft, load_tiny_target, tiny_eagle3, tiny_target
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.features.adapt_draft.learner import Learner, Learnt, LiveHead, Packed, Sample, laid_out
from overlap_spec.models.layers.linear_forms import FORMS, in_form
from overlap_spec.train_draft.eagle3 import check_learns
from overlap_spec.train_draft.head import Batch
from overlap_spec.train_draft.steps import bound

TARGET = tiny_target(3, layers=4)
LOADED = load_tiny_target(TARGET)
HEAD = tiny_eagle3(5, TARGET, agree=False, aux_layers=(0, 2))


def loaded_head(form: str = "") -> Any:
    weights = load_tiny_draft(HEAD, LOADED)
    return in_form(weights, FORMS[form], FORMS[form]) if form else weights


def drawn(tensors: dict[str, torch.Tensor], seed: int = 4) -> dict[str, torch.Tensor]:
    random_ = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=random_).double() for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", ["", "weight @ x.T", "packed"])
def test_weights_are_read_and_written_in_place(form: str) -> None:
    if form == "packed":
        target = load_tiny_target(TARGET, torch.float32)
        weights = in_form(load_tiny_draft(HEAD, target), FORMS[form], FORMS[form])
    else:
        weights = loaded_head(form)
    live = LiveHead(weights)
    kept = {id(weights.fusion.fc.stored), id(weights.layers[0].attention.qkv.stored), id(weights.norm.weight)}
    for name, tensor in live.tensors().items():
        stored = HEAD.tensors[name].to(tensor.dtype)
        torch.testing.assert_close(tensor, stored, msg=name)
    other = drawn(live.tensors())
    live.write(other)
    for name, tensor in live.tensors().items():
        torch.testing.assert_close(tensor, other[name].to(tensor.dtype), rtol=0, atol=0, msg=name)
    assert kept == {id(weights.fusion.fc.stored), id(weights.layers[0].attention.qkv.stored), id(weights.norm.weight)}


def step(learner: Learner, given: Batch, places: torch.Tensor) -> None:
    learner.step("", lambda: Learnt(given, places, torch.tensor(len(places))))


def judge(learner: Learner, given: Batch, places: torch.Tensor) -> Any:
    return learner.judge("", lambda: Learnt(given, places, torch.tensor(len(places))))


def batch(learner: Learner, dtype: torch.dtype = torch.float64) -> tuple[Batch, torch.Tensor]:
    random_ = torch.Generator().manual_seed(1)
    samples = [(0, Sample(torch.randint(3, 128, (20 + n,), generator=random_).tolist(), 4, 0)) for n in range(2)]
    laid = laid_out(samples, learner.is_known, 64)
    hidden = LOADED.hidden_size
    aux, states = (torch.randn(*laid.rows.shape, n * hidden, generator=random_).to(dtype) for n in (2, 1))
    return Batch(laid.batch.tokens, aux, states, laid.batch.lengths, laid.batch.starts), laid.places


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_change_the_copy_alone_until_it_takes_over(dtype: torch.dtype) -> None:
    """In the copy's own type, too, no tensor of the head and none that it goes back to is the copy's."""
    target = load_tiny_target(TARGET, dtype)
    learner = Learner(load_tiny_draft(HEAD, target), target, 64, num_guesses=2)
    given, places = batch(learner, dtype)
    before = {name: tensor.clone() for name, tensor in learner.live.tensors().items()}
    first = float(learner.copy.loss_at(given, places, torch.tensor(len(places))).detach())
    for _ in range(3):
        step(learner, given, places)
    assert float(learner.copy.loss_at(given, places, torch.tensor(len(places))).detach()) < first
    for name, tensor in learner.live.tensors().items():
        assert torch.equal(tensor, before[name]) and not torch.equal(tensor.float(), learner.copy.tensors[name]), name
    learner.take_over()
    for name, tensor in learner.live.tensors().items():
        assert torch.equal(tensor.float(), learner.copy.tensors[name].detach()), name
        assert not torch.equal(tensor, before[name]), name
    step(learner, given, places)
    learner.go_back()
    for name, tensor in learner.live.tensors().items():
        assert torch.equal(tensor, before[name]), name
        assert torch.equal(learner.copy.tensors[name].detach(), before[name].float()), name
    assert learner.num_steps == 0
    for values in learner._steps.state()["state"].values():
        assert values and not any(tensor.any() for tensor in values.values())


def test_a_judgement_is_of_both_heads_and_of_the_windows_guesses() -> None:
    """The copy says one token whatever it reads, which is what the samples say: two guesses of seven count."""
    learner = Learner(loaded_head(), LOADED, 64, num_guesses=2)
    given, places = batch(learner)
    given.tokens[:, ::2] = learner.copy.ids[0]
    found, untouched = judge(learner, given, places), learner.copy.accepted(given)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], untouched.clamp(max=2))
    given.tokens[:] = learner.copy.ids[0]
    live = learner.copy.accepted(given).clamp(max=2)
    with torch.no_grad():
        learner.copy.tensors["lm_head.weight"].zero_()
    found = judge(learner, given, places)
    assert torch.equal(found[0], live) and bool(found[2])
    assert int(learner.copy.accepted(given).max()) == 7 and int(found[1].max()) == 2


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "norm.weight"])
def test_numbers_that_are_not_finite_show(name: str) -> None:
    learner = Learner(loaded_head(), LOADED, 64, num_guesses=3)
    given, places = batch(learner)
    assert bool(judge(learner, given, places)[2])
    with torch.no_grad():
        learner.copy.tensors[name].view(-1)[3] = torch.nan
    assert not bool(judge(learner, given, places)[2])


def test_gradients_that_are_not_finite_change_nothing() -> None:
    def bounded(*gradients: list[float]) -> tuple[bool, list[Tensor | None]]:
        tensors = [torch.zeros(len(each)) for each in gradients]
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = torch.tensor(gradient)
        return bool(bound([*tensors, torch.zeros(1)])), [tensor.grad for tensor in tensors]

    assert bounded([3.0, 4.0], [0.0])[0]
    torch.testing.assert_close(bounded([3.0, 4.0], [0.0])[1], [torch.tensor([0.6, 0.8]), torch.tensor([0.0])])
    torch.testing.assert_close(bounded([0.3])[1], [torch.tensor([0.3])])
    assert repr(bounded([1.0], [torch.inf])) == repr((False, [torch.zeros(1)] * 2))
    learner = Learner(loaded_head(), LOADED, 64, num_guesses=3)
    given, places = batch(learner)
    given.aux[0, 3] = torch.nan
    before = {name: tensor.detach().clone() for name, tensor in learner.copy.tensors.items()}
    step(learner, given, places)
    for name, tensor in learner.copy.tensors.items():
        torch.testing.assert_close(tensor.detach(), before[name], rtol=1e-4, atol=0, msg=name)


def test_samples_are_laid_out_without_rows_of_others() -> None:
    known = torch.ones(128, dtype=torch.bool)
    known[7] = False
    laid = laid_out([(100, Sample([1, 2, 3, 4, 5, 7], 2, 4)), (200, Sample([9] * 40, 1, 0))], known, 64)
    assert laid.rows.shape == (2, 64)
    assert laid.rows[0].tolist() == [104, 105, 106, 107, *[108] * 60], "the last token has no state"
    assert laid.rows[1].tolist() == [*range(200, 239), *[238] * 25]
    assert laid.batch.lengths.tolist() == [6, 40] and laid.batch.starts.tolist() == [3, 2]
    # Row i guesses token i + 2: of the first sample tokens 3 and 4, as 7 is not known.
    assert laid.places.tolist() == [1, 2, *range(64, 64 + 38)]


def test_a_batch_of_a_fixed_shape_teaches_what_its_samples_do() -> None:
    """Places, rows and samples that fill it up count for nothing; the ring's rows that no sample has may be NaN."""
    learner, random_ = Learner(loaded_head(), LOADED, 96, num_guesses=3), torch.Generator().manual_seed(2)
    samples = [
        (10, Sample(torch.randint(3, 128, (30,), generator=random_).tolist(), 4, 2)),
        (50, Sample([9] * 40, 1, 0)),
    ]
    aux, hidden = (torch.full((120, n * LOADED.hidden_size), torch.nan).double() for n in (2, 1))
    for first, sample in samples:
        rows = slice(first + sample.offset, first + sample.offset + len(sample.tokens) - 1)
        for states in (aux, hidden):
            states[rows] = torch.randn(states[rows].shape, generator=random_).double()
        hidden[rows][: sample.start] = torch.nan  # of a prompt the last layer's are not kept
    exact, filled = (laid_out(samples, learner.is_known, *shape) for shape in ((40,), (64, 3)))
    losses, found = list[float](), list[Any]()
    for laid, num_places in ((exact, len(exact.places)), (filled, 96)):
        packed = Packed.of(laid, num_places)
        learnt = packed.read(packed.values, aux, hidden)
        assert learnt.places.shape == (num_places,) and packed.key == (*laid.rows.shape, num_places)
        losses.append(float(learner.copy.loss_at(*learnt).detach()))
        # mypy infers no type of a lambda's default
        found.append(learner.judge(packed.key, lambda learnt=learnt: learnt))  # type: ignore[misc]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 0
    assert torch.equal(found[0].copy, found[1].copy[:2, :40]) and all(each.is_finite for each in found)


def test_a_batch_without_places_teaches_nothing() -> None:
    learner = Learner(loaded_head(), LOADED, 96, num_guesses=3)
    laid = laid_out([(0, Sample([7] * 20, 4, 0))], torch.zeros(128, dtype=torch.bool), 20)
    packed = Packed.of(laid, 16)
    states = (torch.randn(20, n * LOADED.hidden_size).double() for n in (2, 1))
    assert float(learner.copy.loss_at(*packed.read(packed.values, *states)).detach()) == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab": None}, "the target's head"),
        ({"num_hidden_layers": 2}, "layers beside the first"),
        ({"norm_output": True}, "norm_output"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"architectures": ["MistralForCausalLMEagle3"], "sliding_window": 8}, "norms of heads, sinks or a window"),
    ],
)
def test_other_heads_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    head = load_tiny_draft(tiny_eagle3(5, TARGET, aux_layers=(0, 2), **changes), LOADED)
    with pytest.raises(ConfigError, match=f"^--adapt-draft: .*{said}"):
        check_learns(head, LOADED, "adapt_draft")


def test_another_kind_of_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="^--adapt-draft: an EAGLE-3 head .* can learn, not a object"):
        check_learns(object(), LOADED, "adapt_draft")
