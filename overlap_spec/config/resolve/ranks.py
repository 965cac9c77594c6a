"""Resolves how many ranks share each layer, and what of the machine each of them gets."""

from overlap_spec.config import PLAIN, EngineConfig, Machine, facts_of
from overlap_spec.config.ranks import POSSIBLE_RANKS
from overlap_spec.errors import ConfigError

SPIN_S = 0.02  # longer than a decode step of a large model
SPIN_CORES = 6  # two for the polling processes, the rest for frontend, server and clients; one more a further rank


def resolve_ranks(config: EngineConfig, device: str, machine: Machine, notes: list[str]) -> int:
    """How many there are on this machine.

    Raises: ConfigError naming a number of ranks that there cannot be, or the first rank without a GPU.
    """
    ranks = config.tp_size
    if ranks not in POSSIBLE_RANKS:
        possible = ", ".join(map(str, POSSIBLE_RANKS))
        raise ConfigError("tp_size", f"heads are divided among {possible} ranks, got {ranks}")
    of_draft, method = config.speculative_draft_tp_size, config.speculative_algorithm or PLAIN
    if of_draft not in (None, 1) and not (of_draft == ranks and facts_of(method).is_divided):
        what = "each rank has all of this method's draft"
        if facts_of(method).is_divided:
            what = f"layers of {method} are divided among 1 or all {ranks} ranks"
        raise ConfigError("speculative_draft_tp_size", f"{what}, got {of_draft}; use 1, or leave it out")
    if device == "cuda" and ranks > machine.num_gpus:
        raise ConfigError("tp_size", f"rank {machine.num_gpus} of {ranks} has no GPU: there are {machine.num_gpus}")
    if device == "cpu" and ranks > 1:
        notes.append(f"tp_size {ranks} on a CPU is for tests: ranks share its cores, and one has them all")
    return ranks


def threads_of(machine: Machine, ranks: int) -> int:
    """Compute threads of each rank: what the user asks for, or a part of the cores."""
    return machine.num_threads or max(machine.num_cores // ranks, 1)


def spin_of(machine: Machine, device: str, ranks: int) -> float:
    """How long scheduler and ranks poll before they sleep."""
    return SPIN_S if device == "cuda" and machine.num_cores >= SPIN_CORES + ranks - 1 else 0.0
