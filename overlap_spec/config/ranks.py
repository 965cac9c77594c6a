"""The ranks of an engine: processes that share each layer, one for each device; how many there are, and their roles.

worker      rank 0: answers the scheduler for all of them
worker-1    rank 1, and so on: get the same plans, and are silent
"""

from collections.abc import Mapping

from overlap_spec.config.flags import EngineConfig
from overlap_spec.config.settings import Machine
from overlap_spec.config.speculation import PLAIN, facts_of
from overlap_spec.errors import ConfigError

WORKER = "worker"
POSSIBLE_RANKS = (1, 2, 4, 8)


def role_of(rank: int) -> str:
    """The role of a rank's process."""
    return f"{WORKER}-{rank}" if rank else WORKER


def worker_roles(ranks: int) -> tuple[str, ...]:
    """The roles of all ranks, in their order."""
    return tuple(role_of(rank) for rank in range(ranks))


def rank_of(role: str) -> int | None:
    """The rank that a role is of; None: it is no worker's."""
    name, _, number = role.partition("-")
    if name != WORKER:
        return None
    return int(number) if number else 0


def with_ranks(roles: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The modules of an engine's roles, with those of further ranks: they run what rank 0 runs."""
    further = worker_roles(ranks)[1:] if WORKER in roles else ()
    return {**roles, **{role: roles[WORKER] for role in further}}


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
