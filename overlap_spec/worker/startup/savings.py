"""What an engine takes of memory beside KV pages, and what each flag would give back.

The order is that of SGLang's out-of-memory guide: what costs least speed comes first. Two knobs have no part in the
sum: CUDA graphs, whose memory is known once they are captured, and `--mem-fraction-static`, which divides all there is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from overlap_spec.messages import MemorySaving
from overlap_spec.worker.startup.memory_budget import drawing_bytes, workspace_bytes

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
    scratch_rows: int = 0  # rows of each slot in the draft's cache that are no page's: those of trees
    ngram_log: int = 0
    ngram_capacity: int = 0  # tokens that the log holds
    token_bytes: int = 0  # of a token, beside its KV: its id
    level_rows: int = 1  # rows of each slot in a draft step
    history: int = 0  # tokens before a row that a logit processor of one's own may look at
    column_bytes: int = 0  # of features, for each column of each window
    slot_bytes: int = 0  # of features, for each slot
    drawn_from: int = 0  # tokens that guesses are drawn from, where what they were drawn from is kept
    gathered_keys: int = 0  # that a long chunk copies out of their pages at once, in 16 bits
    layer_kv: int = 0  # of a token in one layer, in the models' dtype
    kv_itemsize: int = 0  # of KV pages; 0: `itemsize`
    roundable: int = 0  # of the target's weights, that --quantization fp8 would halve
    widest: int = 0  # of them, the largest linear: in 16 bits it needs a buffer then

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
        return drawn + columns + gathered + workspace_bytes(self.chunk * self.hidden_size * self.itemsize)

    @property
    def scratch(self) -> int:
        """What trees are drafted in, the dummy slot's included."""
        return (self.max_running_requests + 1) * self.scratch_rows * self.draft_kv

    @property
    def draft_probs(self) -> int:
        """What guesses were drawn from, in float32: for each a row, and its own probability; the dummy slot's too."""
        columns = self.drawn_from + 1 if self.drawn_from else 0
        return (self.max_running_requests + 1) * (self.width - 1) * columns * 4

    @property
    def kept(self) -> int:
        """What features keep of slots, the dummy slot's too."""
        return (self.max_running_requests + 1) * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        """All but pages."""
        weights = self.target_weights + self.draft_weights
        return weights + self.ngram_log + self.workspace + self.scratch + self.draft_probs + self.kept


def savings(demand: Demand) -> list[MemorySaving]:
    """What can be turned down, each by itself, in the order in which to try."""
    return [
        MemorySaving(flag, demand.num_bytes - less.num_bytes, demand.per_token - less.per_token)
        for flag, less in _turned_down(demand)
        if less.num_bytes < demand.num_bytes or less.per_token < demand.per_token
    ]


def _turned_down(demand: Demand) -> Iterator[tuple[str, Demand]]:
    window = next((width for width in WINDOWS if width < demand.width), None)
    if window is not None:
        yield f"--speculative-num-draft-tokens {window}", replace(demand, width=window)
    if demand.scratch_rows:
        yield "--speculative-eagle-topk 1", replace(demand, scratch_rows=0)
    if demand.ngram_log:
        tenth = demand.ngram_capacity // 10
        yield f"--speculative-ngram-capacity {tenth}", replace(demand, ngram_log=demand.ngram_log // 10)
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
        plain = replace(demand, width=1, draft_weights=0, draft_kv=0, scratch_rows=0, ngram_log=0)
        yield "--speculative-algorithm NONE", plain


def _in_16_bits(demand: Demand) -> Demand:
    with_kv = demand if demand.kv_itemsize == 1 else _with_kv_of(demand, 2)
    return replace(
        with_kv,
        itemsize=2,
        target_weights=demand.target_weights // 2,
        draft_weights=demand.draft_weights // 2,
        layer_kv=demand.layer_kv // 2,
    )


def _with_kv_of(demand: Demand, itemsize: int) -> Demand:
    """With KV pages whose values have so many bytes."""
    before = demand.kv_itemsize or demand.itemsize
    target_kv, draft_kv = (num_bytes * itemsize // before for num_bytes in (demand.target_kv, demand.draft_kv))
    return replace(demand, target_kv=target_kv, draft_kv=draft_kv, kv_itemsize=itemsize)
