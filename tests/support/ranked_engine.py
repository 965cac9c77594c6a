"""An engine of several ranks on a CPU, each of which has the whole of a tiny model and reduces its logits."""

from msgspec.structs import replace

from overlap_spec import Engine, EngineConfig
from overlap_spec.config import Settings
from overlap_spec.runtime.actor import ROLES


class RankedEngine(Engine):
    """An engine of so many ranks."""

    def __init__(self, config: EngineConfig, ranks: int, worker: str = "support.actors.reducing_worker") -> None:
        super().__init__(config, roles=ROLES | {"worker": worker})
        self._ranks = ranks

    def _resolve(self) -> tuple[Settings, list[str]]:
        settings, notes = super()._resolve()
        return replace(settings, ranks=self._ranks, num_threads=1, proposes_forced=False), notes
