"""The ranks of an engine: processes that share each layer, one for each device, and the roles they run in.

worker      rank 0: answers the scheduler for all of them
worker-1    rank 1, and so on: get the same plans, and are silent
"""

from collections.abc import Mapping

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
