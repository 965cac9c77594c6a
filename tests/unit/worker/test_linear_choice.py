"""Forms and threads are the fastest of what was timed; what was kept is used, if it makes sense."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_spec.models.layers.linear import Linear, PackedLinear, make_linear
from overlap_spec.models.layers.linear_forms import FORMS, Form
from overlap_spec.runtime import measured as measured_module
from overlap_spec.worker.startup import linear_choice
from overlap_spec.worker.startup.linear_choice import LinearChoice, fastest, fewest_threads, measure, thread_counts


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
    layers = tuple(make_linear(torch.randn(8, 4)) for _ in range(3))
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
        linear_choice,
        "_best",
        lambda formed, inputs, limit: (rounds.append(len(inputs)), best(formed, inputs, limit))[1],
    )
    timed = linear_choice.timer([make_linear(torch.randn(64, 32))])
    for _ in range(2):
        assert all(timed(form, 1, (1, 4)) > 0 for form in FORMS.values())
    assert len(rounds) == 3 * len(FORMS)


@pytest.mark.parametrize(("first", "limit", "turns", "result"), [(5.0, 4.0, 1, 5.0), (5.0, 6.0, 3, 2.0)])
def test_a_form_that_is_far_behind_in_the_first_round_gets_no_other(
    first: float, limit: float, turns: int, result: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, taken = iter([first, 3.0, 2.0]), []
    monkeypatch.setattr(linear_choice, "_round", lambda formed, inputs: (taken.append(1), next(seconds))[1])
    assert linear_choice._best([], [], limit) == result
    assert len(taken) == turns


def test_forms_are_held_against_the_best_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    results = iter([3.0, 2.0, 4.0])  # of all rows alike
    monkeypatch.setattr(linear_choice, "_best", lambda formed, inputs, limit: (limits.append(limit), next(results))[1])
    timed, rows = linear_choice.timer([make_linear(torch.randn(64, 32))]), linear_choice.PROMPT_ROWS
    for form in list(FORMS.values())[:3]:
        assert timed(form, torch.get_num_threads(), ()) > 0
    assert rows not in (1, 4) and limits == [float("inf"), 3.0 * linear_choice.HOPELESS, 2.0 * linear_choice.HOPELESS]


def test_what_was_packed_while_loading_is_timed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, formed_of = make_linear(torch.randn(64, 32)), []
    monkeypatch.setattr(linear_choice, "_best", lambda formed, inputs, limit: (formed_of.extend(formed), 1.0)[1])
    timed = linear_choice.timer([linear])
    for form in FORMS.values():
        timed(form, torch.get_num_threads(), ())
    kept = [formed.stored for formed in formed_of]
    assert isinstance(linear, PackedLinear)
    assert kept[0] is linear.stored and kept[1] is linear.stored
    assert kept[2] is kept[3] and kept[2].layout is torch.strided


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
    files = SimpleNamespace(config={"hidden_size": 8})
    model = {"device": "cpu", "dtype": "float32", "files": files, "keeps_integers": False} | changes
    spec = SimpleNamespace(method="a method", width=4)
    return SimpleNamespace(
        model=SimpleNamespace(**model), spec=spec, num_threads=2, threads_given=threads_given, ranks=1
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
