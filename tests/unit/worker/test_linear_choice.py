"""Forms and threads are the fastest of what was timed; what was kept is used, if it makes sense."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_spec.models.layers.linear import Linear, linear_map
from overlap_spec.models.layers.linear_forms import FORMS, Form
from overlap_spec.runtime import measured as measured_module
from overlap_spec.worker.sizing import linear_choice
from overlap_spec.worker.sizing.linear_choice import LinearChoice, fastest, fewest_threads, measure, thread_counts


@pytest.mark.parametrize("name", FORMS)
def test_the_fastest_form(name: str) -> None:
    assert fastest(lambda form: 1.0 if form.name == name else 2.0) == name


@pytest.mark.parametrize(
    ("seconds", "chosen"), [({8: 1.0, 4: 1.0}, 8), ({8: 1.0, 4: 0.97}, 8), ({8: 1.0, 4: 0.5}, 4), ({8: 1, 4: 2}, 8)]
)
def test_fewer_threads_must_be_clearly_faster(seconds: dict[int, float], chosen: int) -> None:
    assert fewest_threads(seconds.__getitem__, [8, 4]) == chosen


def test_threads_that_are_tried() -> None:
    assert thread_counts(16) == [16, 8, 4, 2, 1]
    assert thread_counts(3) == [3, 1]
    assert thread_counts(1) == [1]


@pytest.fixture
def keeps_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_part_is_timed_at_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target at the window, the draft at one row too, the head by itself; then threads, in the target's form."""
    timed: list[tuple[int, str, int, tuple[int, ...]]] = []

    def timer(linears: Any) -> Any:
        number = len(list(linears))

        def seconds(form: Form, threads: int, rows: tuple[int, ...]) -> float:
            timed.append((number, form.name, threads, rows))
            best = {(3, (4,)): "x @ weight.T", (3, (1, 4)): "weight @ x.T", (1, (4,)): "packed"}[number, rows]
            return (1.0 if form.name == best else 2.0) / (3 - threads)

        return seconds

    monkeypatch.setattr(linear_choice, "timer", timer)
    layers = tuple(linear_map(torch.randn(8, 4)) for _ in range(3))
    target: Any = SimpleNamespace(head=Linear(torch.randn(9, 4)))
    monkeypatch.setattr(linear_choice, "linears_of", lambda node: [*layers, target.head])
    models: Any = SimpleNamespace(target=target)
    assert measure(models, 4, [2, 1]) == LinearChoice(1, target="x @ weight.T", draft="weight @ x.T", head="packed")
    assert [row for row in timed if row[2] == 2 and row[0] == 3] == [
        *((3, name, 2, (4,)) for name in FORMS),
        (3, "x @ weight.T", 2, (4,)),
    ]


def test_a_real_measurement_ends_and_nothing_is_timed_twice(
    monkeypatch: pytest.MonkeyPatch, keeps_threads: None
) -> None:
    rounds: list[int] = []
    best = linear_choice._best
    monkeypatch.setattr(
        linear_choice, "_best", lambda formed, inputs: (rounds.append(len(inputs)), best(formed, inputs))[1]
    )
    timed = linear_choice.timer([linear_map(torch.randn(64, 32))])
    for _ in range(2):
        assert all(timed(form, 1, (1, 4)) > 0 for form in FORMS.values())
    assert len(rounds) == 3 * len(FORMS)


class Widths(list[int]):
    """Widths that were measured, and the numbers of threads that were to be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[list[int]] = []


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_threads: None) -> Widths:
    """Widths that were measured; forms are kept in a directory of their own."""
    widths = Widths()

    def measured(models: Any, width: int, counts: list[int]) -> LinearChoice:
        widths.append(width)
        widths.counts.append(counts)
        return LinearChoice(1, *["packed"] * 3)

    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_module, "seconds_of_others", lambda: 0.0)  # as on a quiet machine
    monkeypatch.setattr(linear_choice, "measure", measured)
    monkeypatch.setattr(linear_choice, "replace", lambda models, **parts: parts)
    return widths


def settings(threads_given: bool = False, **changes: Any) -> Any:
    model = {"device": "cpu", "dtype": "float32", "files": SimpleNamespace(config={"hidden_size": 8})} | changes
    spec = SimpleNamespace(method="a method", width=4)
    return SimpleNamespace(
        model=SimpleNamespace(**model), spec=spec, num_threads=2, spin_count=0, threads_given=threads_given
    )


MODELS: Any = SimpleNamespace(target=(), proposer=())


def test_a_second_start_measures_nothing(asked: list[int]) -> None:
    first, second = (linear_choice.choose_linears(settings(), MODELS) for _ in range(2))
    assert first == second
    assert asked == [4]


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"dtype": "float64"}, {"dtype": "bfloat16"}])
def test_only_float32_on_a_cpu_has_forms(other: dict[str, str], asked: list[int]) -> None:
    assert linear_choice.choose_linears(settings(**other), MODELS) is MODELS
    assert asked == []


def test_a_kept_form_that_is_gone_is_measured_again(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    linear_choice.choose_linears(settings(), MODELS)
    packed = FORMS["packed"]
    monkeypatch.setattr(linear_choice, "FORMS", {"another": Form("another", packed.lay_out, packed.run)})
    with pytest.raises(KeyError):
        linear_choice.choose_linears(settings(), MODELS)
    assert asked == [4, 4]


@pytest.mark.parametrize(("given", "tried"), [(False, [2, 1]), (True, [2])])
def test_threads_that_the_user_wants_are_not_tried_with_fewer(given: bool, tried: list[int], asked: Widths) -> None:
    linear_choice.choose_linears(settings(threads_given=given), MODELS)
    assert asked.counts == [tried]
