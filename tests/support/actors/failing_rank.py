"""A worker whose second rank cannot start, while the first one waits for it."""

from overlap_spec.config.ranks import rank_of
from overlap_spec.errors import ConfigError
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.worker import entry


async def main(context: ActorContext) -> None:
    """Run rank 0."""
    if rank_of(context.role):
        raise ConfigError("tp_size", "rank 1 has no GPU")
    await entry.main(context)
