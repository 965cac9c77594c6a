"""Chooses threads and the form of linears on a CPU by timing them on the loaded weights. Not here: the forms.

It takes about a second, so what came of it is kept for the next start with the same model, width and machine.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.measured import once
from overlap_spec.models.linear_forms import FORMS, Form, FormedLinear, in_form, linears_of, plain_weight
from overlap_spec.worker.geometry import LoadedModels

KEPT = "linears"
MEASURED_BYTES = 128 << 20  # of weights: more than caches hold
ROUNDS = 3
PROMPT_ROWS = 16  # of prefill, which is so many times as rare as its rows are more
FASTER = 0.9  # fewer threads must do it in so much of the time

Seconds = Callable[[Form, int], float]  # of linears in this form on so many threads


@dataclass(frozen=True)
class LinearChoice:
    """What was fastest at the rows of a lone request's step."""

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
def choose_linears(settings: Settings, models: LoadedModels) -> LoadedModels:
    """The models with their linears in the forms that are fastest here, and torch on as many threads.

    As they were on a GPU, and in other types than float32: float64 is the oracle, the same on every machine.
    """
    if settings.model.device != "cpu" or settings.model.dtype != "float32":
        return models
    width, threads, given = settings.spec.width, settings.num_threads, settings.threads_given
    of = (settings.model.files.config, settings.spec.method, width, threads, given, settings.spin_count)
    counts = [threads] if given else thread_counts(threads)
    choice = once(KEPT, of, LinearChoice, lambda: measure(models, width, counts), lambda found: found.known)
    torch.set_num_threads(choice.threads)
    forms = FORMS[choice.target], FORMS[choice.draft], FORMS[choice.head]
    target = in_form(models.target, forms[0], forms[2])
    proposer = in_form(models.proposer, forms[1], forms[2])
    return replace(models, target=target, proposer=proposer, linears=str(choice))


def thread_counts(most: int) -> list[int]:
    """All, and halves of them, down to one."""
    return [most, *thread_counts(most // 2)] if most > 1 else [1]


def measure(models: LoadedModels, width: int, counts: list[int]) -> LinearChoice:
    """Time the forms at `width` rows, the draft's at one too, which is what most of its steps have."""
    head = getattr(models.target, "head", None)
    layers = [linear for linear in linears_of(models.target) if linear is not head]
    heads = [] if head is None else [head]
    rows = (width,)
    seconds = timer(layers, rows)
    threads = fewest_threads(lambda count: min(seconds(form, count) for form in FORMS.values()), counts)
    target = fastest(seconds, threads)
    of_draft = timer(layers, (1, width)) if width > 1 else seconds
    of_heads = timer(heads, rows)
    return LinearChoice(threads, target, fastest(of_draft, threads), fastest(of_heads, threads) if heads else target)


def fewest_threads(seconds: Callable[[int], float], counts: list[int]) -> int:
    """The first count, unless fewer are clearly faster."""
    chosen, best = counts[0], seconds(counts[0])
    for count in counts[1:]:
        if (found := seconds(count)) < FASTER * best:
            chosen, best = count, found
    return chosen


def fastest(seconds: Seconds, threads: int) -> str:
    """The form that takes least."""
    return min(FORMS.values(), key=lambda form: seconds(form, threads)).name


def timer(linears: Iterable[object], rows: tuple[int, ...]) -> Seconds:
    """Times some of the linears, as much memory as does not fit into a cache, at those numbers of rows."""
    weights: list[Tensor] = []
    for linear in linears_of(tuple(linears)):
        if sum(weight.nbytes for weight in weights) < MEASURED_BYTES:
            weights.append(plain_weight(linear))
    shares = [*((count, 1.0) for count in rows), (PROMPT_ROWS, 1 / PROMPT_ROWS)]

    def seconds(form: Form, threads: int) -> float:
        torch.set_num_threads(threads)
        formed = [FormedLinear(form.lay_out(weight), None, form) for weight in weights]
        inputs = [(share, [torch.ones(count, weight.shape[1]) for weight in weights]) for count, share in shares]
        return sum(share * _best(formed, of_weights) for share, of_weights in inputs)

    return seconds


def _best(formed: list[FormedLinear], inputs: list[Tensor]) -> float:
    taken = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        for linear, x in zip(formed, inputs, strict=True):
            linear(x)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
