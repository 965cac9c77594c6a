"""How many KV pages fit, what the engine takes of memory beside them, and what each flag would give back.

Weights are loaded first, so that what is left is known; from it come the workspace of the largest step and then
the pages of target and draft together (they share page ids, each with its own bytes per token).

Flags that give memory back are listed in the order of SGLang's out-of-memory guide: what costs least speed comes first.
Two knobs have no part in the sum: CUDA graphs, whose memory is known once they are captured, and
`--mem-fraction-static`, which divides all there is.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from overlap_spec.config import MIB, CacheSettings
from overlap_spec.errors import ConfigError
from overlap_spec.messages import MemorySaving
from overlap_spec.models.interfaces import NO_LOG, DraftLog
from overlap_spec.sampling.sampler import SLICE

CPU_POOL_BYTES = 1024 * MIB
LOGIT_BYTES = torch.float32.itemsize
COUNT_BYTES = torch.int32.itemsize
DRAWN_BYTES = 96  # of a logit in a slice: filters hold 48 in tensors of their own, and a sort on a GPU the rest
HISTORY_BYTES = 48  # of a row and a token before it, in a logit processor of one's own
OTHER_BYTES = 128 * MIB  # of libraries and attention
ADVICE = "lower --max-total-tokens or --speculative-num-steps, or use a 16-bit --dtype"


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


FEW_REQUESTS = 4
SHORT_CHUNK = 2048  # prompt tokens
WINDOWS = (16, 8, 4, 2)  # draft tokens that one may go down to


@dataclass(frozen=True)
class Demand:
    """Everything that the sum depends on. Sizes in bytes."""

    target_weights: int
    draft_weights: int
    target_kv: int  # of a token
    draft_kv: int
    vocab_size: int
    hidden_size: int
    itemsize: int  # of the models' dtype
    max_running_requests: int
    width: int
    chunk: int  # prompt tokens of the longest prefill step
    scratch_rows: int = 0  # rows of each slot in the draft's cache that are no page's: of trees and blocks
    draft_log: DraftLog = NO_LOG
    token_bytes: int = 0  # of a token, beside its KV: its id
    level_rows: int = 1  # rows of each slot in a draft step
    block_flag: str = ""  # that sets the rows of a block, by which the window goes; "": the draft guesses none
    is_tree: bool = False  # guesses are trees
    branch: int = 0  # guesses of a tree that are a branch beside a chain
    branch_flag: str = ""  # that sets them
    history: int = 0  # tokens before a row that a logit processor of one's own may look at
    column_bytes: int = 0  # of features, for each column of each window
    slot_bytes: int = 0  # of features, for each slot
    feature_bytes: int = 0  # of features, whatever the number of slots
    drawn_from: int = 0  # tokens that guesses are drawn from, where what they were drawn from is kept
    gathered_keys: int = 0  # that a long chunk copies out of their pages at once, in 16 bits
    layer_kv: int = 0  # of a token in one layer, in the models' dtype
    kv_itemsize: int = 0  # of KV pages; 0: `itemsize`
    roundable: int = 0  # of the target's weights, that --quantization fp8 would halve
    widest: int = 0  # of them, the largest linear: in 16 bits it needs a buffer then
    attention_scratch: int = 0  # beside what all attention takes
    state: int = 0  # of a slot's recurrent layers
    state_column: int = 0  # of theirs, for each column of a window
    placed_slots: int = 0  # beside those of requests, which have states too

    @property
    def per_token(self) -> int:
        """What a token takes in the pool."""
        return self.target_kv + self.draft_kv + self.token_bytes

    @property
    def workspace(self) -> int:
        """What the largest step needs."""
        rows = max(self.width, self.level_rows)
        drawn = drawing_bytes(self.max_running_requests, rows, self.vocab_size, self.history)
        columns = (self.max_running_requests + 1) * self.width * self.column_bytes
        gathered = self.gathered_keys * self.layer_kv if self.itemsize == 2 else 0
        gathered += self.attention_scratch
        return drawn + columns + gathered + workspace_bytes(self.chunk * self.hidden_size * self.itemsize)

    @property
    def scratch(self) -> int:
        """What trees and blocks are drafted in, the dummy slot's included."""
        return (self.max_running_requests + 1) * self.scratch_rows * self.draft_kv

    @property
    def draft_probs(self) -> int:
        """What guesses were drawn from, in float32: for each a row, and its own probability; the dummy slot's too."""
        columns = self.drawn_from + 1 if self.drawn_from else 0
        return (self.max_running_requests + 1) * (self.width - 1) * columns * 4

    @property
    def states(self) -> int:
        """What recurrent layers keep of slots, the dummy slot's and placed ones too."""
        num_slots = self.max_running_requests + 1 + self.placed_slots
        return num_slots * (self.state + self.width * self.state_column)

    @property
    def kept(self) -> int:
        """What features keep: of slots, the dummy slot's too, and beside them."""
        return (self.max_running_requests + 1) * self.slot_bytes + self.feature_bytes

    @property
    def num_bytes(self) -> int:
        """All but pages."""
        weights = self.target_weights + self.draft_weights + self.draft_log.num_bytes
        return weights + self.workspace + self.beside

    @property
    def beside(self) -> int:
        """What is kept beside weights, pages and workspace."""
        return self.scratch + self.draft_probs + self.states + self.kept


def savings(demand: Demand) -> list[MemorySaving]:
    """What can be turned down, each by itself, in the order in which to try."""
    return [
        MemorySaving(flag, demand.num_bytes - less.num_bytes, demand.per_token - less.per_token)
        for flag, less in _turned_down(demand)
        if less.num_bytes < demand.num_bytes or less.per_token < demand.per_token
    ]


def _turned_down(demand: Demand) -> Iterator[tuple[str, Demand]]:
    yield from _narrower(demand)
    if demand.scratch_rows and not demand.block_flag:
        yield "--speculative-eagle-topk 1", replace(demand, scratch_rows=0)
    if demand.draft_log.capacity:
        tenth = demand.draft_log.of_capacity(demand.draft_log.capacity // 10)
        yield f"{tenth.flag} {tenth.capacity}", replace(demand, draft_log=tenth)
    if demand.max_running_requests > FEW_REQUESTS:
        yield f"--max-running-requests {FEW_REQUESTS}", replace(demand, max_running_requests=FEW_REQUESTS)
    if (demand.kv_itemsize or demand.itemsize) > 1:
        yield "--kv-cache-dtype fp8_e4m3", _with_kv_of(demand, 1)
    if demand.itemsize == 4:
        yield "--dtype bfloat16", _in_16_bits(demand)
    if demand.chunk > SHORT_CHUNK:
        yield f"--chunked-prefill-size {SHORT_CHUNK}", replace(demand, chunk=SHORT_CHUNK)
    if demand.roundable:
        less = demand.roundable // 2 - demand.widest
        yield "--quantization fp8", replace(demand, target_weights=demand.target_weights - less, roundable=0)
    if demand.width > 1:
        plain = replace(demand, width=1, draft_weights=0, draft_kv=0, scratch_rows=0, draft_log=NO_LOG)
        yield "--speculative-algorithm NONE", plain


def _narrower(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """A narrower window, by the flag that has an effect on it."""
    window = next((width for width in WINDOWS if width < demand.width), None)
    if window is None:
        return
    if demand.branch:
        fewer = max(1, demand.branch - (demand.width - window))
        width = demand.width - demand.branch + fewer
        yield f"{demand.branch_flag} {fewer}", replace(demand, width=width, branch=fewer)
    elif demand.block_flag and not demand.is_tree:
        rows = window - (demand.width - demand.scratch_rows)
        yield f"{demand.block_flag} {rows}", replace(demand, width=window, scratch_rows=rows, level_rows=rows)
    elif demand.is_tree or demand.draft_log.capacity:
        yield f"--speculative-num-draft-tokens {window}", replace(demand, width=window)
    else:  # a chain has a guess for each step, and its draft tokens follow
        yield f"--speculative-num-steps {window - 1}", replace(demand, width=window)


def _in_16_bits(demand: Demand) -> Demand:
    with_kv = demand if demand.kv_itemsize == 1 else _with_kv_of(demand, 2)
    return replace(
        with_kv,
        itemsize=2,
        target_weights=demand.target_weights // 2,
        draft_weights=demand.draft_weights // 2,
        layer_kv=demand.layer_kv // 2,
        state_column=demand.state_column // 2,
    )


def _with_kv_of(demand: Demand, itemsize: int) -> Demand:
    """With KV pages whose values have so many bytes."""
    before = demand.kv_itemsize or demand.itemsize
    target_kv, draft_kv = (num_bytes * itemsize // before for num_bytes in (demand.target_kv, demand.draft_kv))
    return replace(demand, target_kv=target_kv, draft_kv=draft_kv, kv_itemsize=itemsize)
