"""How many KV pages fit, what the engine takes of memory beside them, and what each flag would give back.

Weights are loaded first, so that what is left is known; from it come the workspace of the largest step and then
the pages of target and draft together (they share page ids, each with its own bytes per token).
"""

import os
from dataclasses import dataclass, replace

import torch

from overlap_spec.config import MIB, CacheSettings
from overlap_spec.errors import ConfigError
from overlap_spec.sampling.sampler import SLICE

CPU_POOL_BYTES = 1024 * MIB
LOGIT_BYTES = torch.float32.itemsize
COUNT_BYTES = torch.int32.itemsize
DRAWN_BYTES = 96  # of a logit in a slice: filters hold 48 in tensors of their own, and a sort on a GPU the rest
HISTORY_BYTES = 48  # of a row and a token before it, in a logit processor of one's own
OTHER_BYTES = 128 * MIB  # of libraries and attention
ADVICE = "lower --max-total-tokens or --speculative-num-draft-tokens, or use a 16-bit --dtype"


@dataclass(frozen=True)
class Budget:
    """Bytes that KV pages may take, how the figure came about, and what to turn to get more (for errors)."""

    num_bytes: int
    account: str
    advice: str = ADVICE

    def less(self, num_bytes: int, purpose: str) -> "Budget":
        """What is left beside something else."""
        if not num_bytes:
            return self
        account = f"{self.account}, of which {num_bytes // MIB} MiB are for {purpose}"
        return replace(self, num_bytes=self.num_bytes - num_bytes, account=account)


def cpu_budget(cache: CacheSettings, weight_bytes: int) -> Budget:
    """1 GiB, or what is available if --max-total-tokens asks for a size of its own."""
    if cache.max_total_tokens is None:
        return Budget(CPU_POOL_BYTES, f"{CPU_POOL_BYTES // MIB} MiB by default")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Budget(available, f"{available // MIB} MiB available after {weight_bytes // MIB} MiB of weights")


@dataclass(frozen=True)
class GpuMemory:
    """What a GPU has, and what of it is taken by weights, the driver and other processes."""

    total: int
    taken: int

    @classmethod
    def here(cls) -> "GpuMemory":
        """Of the current device, as it is now."""
        free, total = torch.cuda.mem_get_info()
        return cls(total, total - free)


def cuda_budget(cache: CacheSettings, workspace_bytes: int, savings: str, memory: GpuMemory) -> Budget:
    """What --mem-fraction-static leaves after weights (already taken) and workspace. `savings`: for the advice."""
    total, taken = memory.total, memory.taken
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


def drawing_bytes(num_slots: int, rows: int, vocab_size: int, history: int = 0) -> int:
    """What drawing `rows` tokens of each slot takes, of processors, samplers and verifiers alike.

    Logits in float32 and their processed copy; what a slice of them is drawn through; how often each token is in a
    slot's text, for penalties. `history`: tokens before a row, where a processor of one's own looks at them: it may
    hold as many logits again, and 48 bytes for each row and token.
    """
    num_logits = num_slots * rows * vocab_size
    own = num_logits * LOGIT_BYTES + num_slots * rows * history * HISTORY_BYTES if history else 0
    counts = num_slots * vocab_size * COUNT_BYTES
    return num_logits * 2 * LOGIT_BYTES + max(SLICE, rows * vocab_size) * DRAWN_BYTES + counts + own


def workspace_bytes(chunk_bytes: int) -> int:
    """What the largest step needs besides KV and drawing.

    `chunk_bytes`: one activation of the longest prefill chunk; about 24 of them live at once.
    """
    return OTHER_BYTES + chunk_bytes * 24
