"""Steps of training: batches that are filled up for graphs, the bound of gradients, and what goes on."""

import math
from typing import Any

import pytest
import torch
from overlap_spec_kernels import NotMadeError
from overlap_spec_kernels.launch import compiling_only
from support.train_batches import batch, block_head, head, loss_of
from torch import Tensor

from overlap_spec.train_draft.dflash import DFlash, DSpark
from overlap_spec.train_draft.eagle3 import Eagle3
from overlap_spec.train_draft.head import Head
from overlap_spec.train_draft.steps import BatchSteps, Replays, Steps

BATCHES = [(1, 3, 20), (2, 2, 20), (3, 4, 16), (4, 1, 20)]  # of 64 rows at most


@pytest.mark.parametrize("kind", [Eagle3, DFlash, DSpark])
def test_batches_that_are_filled_up_teach_what_they_do_alone(kind: Any) -> None:
    """Of one shape they are in one place, whatever the last one left there."""
    heads: list[Head] = [head() if kind is Eagle3 else block_head(kind) for _ in range(2)]
    alone, filled = Steps(heads[0].tensors), BatchSteps(heads[1], 64)
    keys, run = list[Any](), filled._replays.run
    # runs as before, and keeps its keys
    filled._replays.run = lambda key, work: (keys.append(key), run(key, work))[1]  # type: ignore[method-assign]
    for numbers in BATCHES:
        given = batch(*numbers)
        for each in (alone, filled):
            each.set_rate(1e-3)
        # mypy infers no type of a lambda's default
        loss = alone.take(lambda given=given: loss_of(heads[0], given))  # type: ignore[misc]
        assert float(filled.learn(given, torch.Generator().manual_seed(0))) == pytest.approx(float(loss), rel=1e-5)
    for name, tensor in heads[0].tensors.items():
        torch.testing.assert_close(tensor, heads[1].tensors[name], rtol=1e-3, atol=1e-5, msg=name)
    assert [key[:2] for key in keys] == [(3, 20), (3, 20), (4, 16), (3, 20)] and all(key[2] % 8 == 0 for key in keys)


def test_nothing_is_captured_while_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not launched then, and a graph would leave them out for good."""
    replays, captured = Replays(torch.device("cpu")), list[int]()

    class Noted:
        def record(self, part: str, work: Any) -> tuple[Any, int]:
            captured.append(work())
            return (lambda: None), -1

    monkeypatch.setattr(replays, "_recorder", Noted())
    with compiling_only():
        assert [replays.run("key", lambda: 1) for _ in range(3)] == [1, 1, 1] and not captured
    assert [replays.run("key", lambda: 2) for _ in range(3)] == [2, -1, -1] and captured == [2]
    assert replays.run("other", lambda: 3) == 3 and captured == [2]


@pytest.mark.parametrize("error", [RuntimeError("no capture"), NotMadeError("counters")], ids=lambda each: str(each))
def test_what_cannot_be_captured_goes_on_as_it_is(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def record(self, part: str, work: Any) -> tuple[Any, int]:
            raise error

    replays = Replays(torch.device("cpu"))
    monkeypatch.setattr(replays, "_recorder", Refusing())
    assert [replays.run("key", lambda n=n: n) for n in range(3)] == [0, 1, 2]  # type: ignore[misc]  # a default's type
    assert len(caplog.messages) == 1 and str(error) in caplog.text


def test_a_step_without_finite_gradients_says_so_and_changes_nothing() -> None:
    made, given = head(), batch(1, 2, 12)
    before = {name: tensor.detach().clone() for name, tensor in made.tensors.items()}
    given.aux[0, 5] = torch.inf
    steps = Steps(made.tensors)
    steps.set_rate(1e-2)
    assert math.isnan(float(steps.take(lambda: loss_of(made, given))))
    for name, tensor in made.tensors.items():
        torch.testing.assert_close(tensor.detach(), before[name], rtol=1e-3, atol=0, msg=name)


def test_a_run_goes_on_with_the_moments_and_its_own_rate() -> None:
    """Two steps, and one and one: the same parameters."""
    given, found = batch(1, 2, 12), list[dict[str, Tensor]]()
    for parted in (False, True):
        made = head()
        steps = Steps(made.tensors)
        for _ in range(2):
            steps.set_rate(1e-2)
            steps.take(lambda: loss_of(made, given))  # noqa: B023  # called at once
            if parted:
                kept = steps.state()
                steps = Steps(made.tensors)
                steps.go_on(kept)
        found.append({name: tensor.detach() for name, tensor in made.tensors.items()})
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
