"""Chooses threads and the form of linears on a CPU by timing them on the loaded weights.

It takes most of a second, so the result is kept for the next start with the same model, width and machine.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import torch
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.models.layers.linear import DenseLinear
from overlap_spec.models.layers.linear_forms import FORMS, Form, FormedLinear, in_form, laid_out, linears_of
from overlap_spec.runtime.measured import once
from overlap_spec.worker.ranks import ALONE, Agreement
from overlap_spec.worker.startup.geometry import LoadedModels

KEPT = "linears"
MEASURED_BYTES = 128 << 20  # of weights that are timed: more than caches hold
ROUNDS = 2  # timed after the first, which only decides whether the form is hopeless
HOPELESS = 3.0  # a form whose first round takes so many times the best form's time gets no other round
PROMPT_ROWS = 16  # of a prefill step; its time counts 1/16, as there is one such step for 16 of a single row
FASTER = 0.9  # fewer threads are taken if they need at most this share of the time

Seconds = Callable[[Form, int, tuple[int, ...]], float]  # (form, threads, numbers of rows) -> seconds, added up


@dataclass(frozen=True)
class LinearChoice:
    """The threads and forms that were fastest for a step of one request."""

    threads: int
    target: str
    draft: str
    head: str

    @property
    def known(self) -> bool:
        """Whether each is a form of this version."""
        return self.threads >= 1 and {self.target, self.draft, self.head} <= FORMS.keys()

    def __str__(self) -> str:
        return f"{self.target}; draft {self.draft}; heads {self.head}"


@torch.inference_mode()
def choose_linears(settings: Settings, models: LoadedModels, agreement: Agreement = ALONE) -> LoadedModels:
    """Put the linears into the forms that are fastest here, and set the number of threads. Rank 0 chooses for all.

    Nothing changes on a GPU, nor in other types than float32: float64 is for tests and the same on every machine.
    """
    if settings.model.device != "cpu" or settings.model.dtype != "float32":
        return models
    width, threads, given = settings.spec.width, settings.num_threads, settings.threads_given
    kept = settings.model.keeps_integers
    of = (settings.model.files.config, settings.spec.method, width, threads, given, kept, settings.ranks)
    counts = [threads] if given else thread_counts(threads)

    def choice_of_first() -> LinearChoice:
        return once(KEPT, of, LinearChoice, lambda: measure(models, width, counts), lambda found: found.known)

    choice = agreement.of_first("linears", choice_of_first, LinearChoice)
    use_threads(choice.threads)
    forms = FORMS[choice.target], FORMS[choice.draft], FORMS[choice.head]
    target = in_form(models.target, forms[0], forms[2])
    proposer = in_form(models.proposer, forms[1], forms[2])
    return replace(models, target=target, proposer=proposer, linears=str(choice))


def use_threads(count: int) -> None:
    """Set torch's threads if the number differs: torch sets MKL's as well, and a user may have set those apart."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def thread_counts(most: int) -> list[int]:
    """The number itself, and halves of it, down to one."""
    return [most, *thread_counts(most // 2)] if most > 1 else [1]


def measure(models: LoadedModels, width: int, counts: list[int]) -> LinearChoice:
    """Time the forms at `width` rows, and those of the draft at one row too, as most of its steps have one."""
    head = getattr(models.target, "head", None)
    of_layers = timer(linear for linear in linears_of(models.target) if linear is not head)
    target = fastest(lambda form: of_layers(form, counts[0], (width,)))
    threads = fewest_threads(lambda count: of_layers(FORMS[target], count, (width,)), counts)
    draft = fastest(lambda form: of_layers(form, threads, (1, width)))
    if head is None:
        return LinearChoice(threads, target, draft, target)
    of_head = timer([head])
    return LinearChoice(threads, target, draft, fastest(lambda form: of_head(form, threads, (width,))))


def fewest_threads(seconds: Callable[[int], float], counts: list[int]) -> int:
    """The first count, unless fewer are clearly faster."""
    chosen, best = counts[0], seconds(counts[0])
    for count in counts[1:]:
        if (found := seconds(count)) < FASTER * best:
            chosen, best = count, found
    return chosen


def fastest(seconds: Callable[[Form], float]) -> str:
    """The name of the form that takes the least time."""
    return min(FORMS.values(), key=seconds).name


def timer(linears: Iterable[object]) -> Seconds:
    """What times these linears, as many of them as fill more than a cache. It times nothing twice."""
    measured: list[DenseLinear] = []
    num_bytes = 0
    for linear in linears_of(tuple(linears)):
        if num_bytes < MEASURED_BYTES:
            measured.append(linear)
            num_bytes += 4 * _shape(linear).numel()
    best: dict[tuple[int, int], float] = {}  # of the forms so far

    @cache
    def weights(lay_out: Callable[[Tensor], Tensor]) -> list[Tensor]:
        form = next(form for form in FORMS.values() if form.lay_out is lay_out)
        return [laid_out(linear, form) for linear in measured]

    @cache
    def at(form: Form, threads: int, num_rows: int) -> float:
        use_threads(threads)
        formed = [FormedLinear(weight, None, form) for weight in weights(form.lay_out)]
        inputs = [torch.ones(num_rows, _shape(linear)[1]) for linear in measured]
        before = best.get((threads, num_rows), inf)
        taken = _best(formed, inputs, HOPELESS * before)
        best[threads, num_rows] = min(before, taken)
        return taken

    def seconds(form: Form, threads: int, rows: tuple[int, ...]) -> float:
        return sum(at(form, threads, count) for count in rows) + at(form, threads, PROMPT_ROWS) / PROMPT_ROWS

    return seconds


def _shape(linear: DenseLinear) -> torch.Size:
    return linear.stored.shape


def _best(formed: list[FormedLinear], inputs: list[Tensor], limit: float) -> float:
    """The fastest round after the first; the first, if that took longer than `limit`."""
    first = _round(formed, inputs)
    return first if first > limit else min(_round(formed, inputs) for _ in range(ROUNDS))


def _round(formed: list[FormedLinear], inputs: list[Tensor]) -> float:
    started = time.perf_counter()
    for linear, x in zip(formed, inputs, strict=True):
        linear(x)
    return time.perf_counter() - started
