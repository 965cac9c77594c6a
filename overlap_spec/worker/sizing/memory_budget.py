"""How many KV pages fit.

Weights are loaded first, so that what is left is known; from it come the workspace of the largest step and then
the pages of target and draft together (they share page ids, each with its own bytes per token).
"""

import os
from dataclasses import dataclass

import torch

from overlap_spec.config import MIB, CacheSettings
from overlap_spec.errors import ConfigError

CPU_POOL_BYTES = 1024 * MIB
ADVICE = "lower --max-total-tokens or --speculative-num-draft-tokens, or use a 16-bit --dtype"


@dataclass(frozen=True)
class Budget:
    """Bytes that KV pages may take, how the figure came about, and what to turn to get more (for errors)."""

    num_bytes: int
    account: str
    advice: str = ADVICE


def cpu_budget(cache: CacheSettings, weight_bytes: int) -> Budget:
    """1 GiB, or what is available if --max-total-tokens asks for a size of its own."""
    if cache.max_total_tokens is None:
        return Budget(CPU_POOL_BYTES, f"{CPU_POOL_BYTES // MIB} MiB by default")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Budget(available, f"{available // MIB} MiB available after {weight_bytes // MIB} MiB of weights")


def cuda_budget(cache: CacheSettings, workspace_bytes: int, savings: str) -> Budget:
    """What --mem-fraction-static leaves after weights (already taken) and workspace. `savings`: for the advice."""
    free, total = torch.cuda.mem_get_info()
    taken = total - free
    left = int(total * cache.mem_fraction) - taken - workspace_bytes
    account = (
        f"{left // MIB} MiB = {cache.mem_fraction:.2f} of {total // MIB} MiB, less {taken // MIB} MiB taken"
        f" and {workspace_bytes // MIB} MiB of workspace"
    )
    share = f"--mem-fraction-static, of which 0.01 are {total // 100 // MIB} MiB"
    return Budget(left, account, f"lower --max-total-tokens, raise {share}, or turn down, in this order: {savings}")


def free_bytes(device: str) -> int:
    """Free memory of a GPU; 0 on a CPU, whose memory is shared with others."""
    return 0 if device == "cpu" else torch.cuda.mem_get_info()[0]


def num_pages(cache: CacheSettings, bytes_per_token: int, budget: Budget, least_tokens: int) -> int:
    """Pages to allocate, the dummy page 0 included.

    `bytes_per_token`: of all that is sized by pages. `least_tokens`: below this not even one request runs.
    Raises: ConfigError with the missing MiB and the flags to turn.
    """
    page_bytes = bytes_per_token * cache.page_size
    fitting = budget.num_bytes // page_bytes - 1
    wanted = fitting if cache.max_total_tokens is None else -(-cache.max_total_tokens // cache.page_size)
    least = -(-least_tokens // cache.page_size)
    if wanted > fitting or fitting < least:
        missing = (max(wanted, least) - fitting) * page_bytes
        raise ConfigError(
            "max_total_tokens" if cache.max_total_tokens is not None else "mem_fraction_static",
            f"{-(-missing // MIB)} MiB are missing for {max(wanted, least) * cache.page_size} tokens of KV cache at"
            f" {bytes_per_token} bytes each; there are {budget.account}: {budget.advice}",
        )
    if wanted < least:
        raise ConfigError("max_total_tokens", f"must be at least {least_tokens} for one request to run")
    return wanted + 1


def workspace_bytes(num_logits: int, chunk_bytes: int) -> int:
    """What the largest step needs besides KV.

    `num_logits`: logits of the widest verify step, in float32 with a copy, and a sampler's float64 slice.
    `chunk_bytes`: one activation of the longest prefill chunk; about 24 of them live at once.
    """
    return num_logits * 4 * 2 + 512 * MIB + chunk_bytes * 24
