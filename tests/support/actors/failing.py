"""A fake actor whose checkpoint is bad."""

from overlap_spec.errors import CheckpointError
from overlap_spec.runtime.actor import ActorContext


async def main(context: ActorContext) -> None:
    """Fail while starting."""
    raise CheckpointError("model.safetensors: fc.weight is [3, 4], expected [4, 4]")
