"""A worker whose ranks each have all of the model and reduce its logits: halves, added up, are the same bits."""

from dataclasses import replace

import torch

from overlap_spec.config import Settings
from overlap_spec.models.interfaces import Progress
from overlap_spec.models.layers.parallel import WHOLE, Rank, RowParallelLinear
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.worker import build, entry
from overlap_spec.worker.startup.geometry import LoadedModels
from support.threaded_ranks import SummedBy

load_whole = build.load_models


def load_models(settings: Settings, place: torch.device, progress: Progress, rank: Rank = WHOLE) -> LoadedModels:
    """Every step waits for all ranks."""
    models, communicator = load_whole(settings, place, progress), rank.communicator
    assert communicator is not None
    head = RowParallelLinear(models.target.head, SummedBy(lambda part: communicator.all_reduce(part / rank.ranks)))
    return replace(models, target=replace(models.target, head=head))


async def main(context: ActorContext) -> None:
    """Run a rank."""
    build.load_models = load_models
    await entry.main(context)
