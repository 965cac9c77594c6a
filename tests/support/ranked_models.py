"""Ranks of a ring: what each loads of a model, the plans that all get, and what each answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from overlap_spec.messages import StepResult, ToScheduler, ToWorker
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.runtime.transport import Outlet
from overlap_spec.worker.startup.geometry import LoadedModels
from support.ring_links import PlanQueue
from support.threaded_ranks import communicators


@dataclass(frozen=True)
class RankedModels:
    """A model's parts, in the order of the ranks. `abort`: called when one has failed, so that no other waits."""

    parts: tuple[LoadedModels, ...]
    abort: Callable[[], None] = lambda: None


def ranked_models(ranks: int, load: Callable[[Rank], LoadedModels]) -> RankedModels:
    """What ranks load that are threads of this process."""
    group = communicators(ranks)
    parts = tuple(load(Rank(each.rank, ranks, each)) for each in group)
    return RankedModels(parts, group[0].abort)


def of_ranks(models: LoadedModels | RankedModels) -> RankedModels:
    """A model that is not divided is rank 0's."""
    return models if isinstance(models, RankedModels) else RankedModels((models,))


class SharedPlans:
    """The scheduler's link to all ranks."""

    def __init__(self, queues: Sequence[PlanQueue]) -> None:
        self.queues = queues

    def send(self, message: ToWorker) -> None:
        for queue in self.queues:
            queue.send(message)

    def close(self) -> None:
        for queue in self.queues:
            queue.close()


class NotedResults:
    """A rank's link to the scheduler, which hears rank 0 alone. All that a rank has answered is noted."""

    def __init__(self, scheduler: Outlet[ToScheduler] | None) -> None:
        self._scheduler = scheduler
        self.noted: list[StepResult] = []  # without times

    def send(self, message: ToScheduler) -> None:
        if isinstance(message, StepResult):
            self.noted.append(replace(message, gpu_time=0.0, gpu_gap=0.0, launch_time=0.0))
        if self._scheduler is not None:
            self._scheduler.send(message)

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
