"""The facts that an actor reports when it is ready: a struct per role, for the start table, `/server_info`, reports.

Sizes are in bytes and times in seconds; `report` gives the same facts as a person reads them, by the names that JSON
reports use.

**The roofline** is the lower bound of a decode step's time: what its forwards move and compute, and the device's
ceilings. It travels in WorkerReady: the scheduler knows the sequence lengths, and computes how far a step is from its
floor.
"""

from enum import IntEnum
from typing import Any

import msgspec

from overlap_spec.messages.base import Message

Report = dict[str, str | int | float]


class FrontendFacts(Message, frozen=True):
    """`codec`: kind and size of the vocabulary. `client_endpoint`: the address that clients connect to.

    `chat_template`: its source.
    """

    codec: str
    client_endpoint: str
    chat_template: str = ""

    def report(self) -> Report:
        return {"tokenizer": self.codec, "client_endpoint": self.client_endpoint}


class SchedulerFacts(Message, frozen=True):
    """The limits in force. Sizes in tokens. `prefix_cache_keys`: tokens in a key of the prefix cache; 0: it is off."""

    max_total_tokens: int
    max_running_requests: int
    context_length: int
    chunked_prefill_size: int
    steps_in_flight: int
    prefix_cache_keys: int

    @property
    def prefix_cache(self) -> str:
        """The kind of keys, or off."""
        names = {0: "off", 1: "token keys", 2: "bigram keys"}
        return names.get(self.prefix_cache_keys, f"keys of {self.prefix_cache_keys} tokens")

    def report(self) -> Report:
        facts: Report = msgspec.structs.asdict(self)
        del facts["prefix_cache_keys"]
        return facts | {"prefix_cache": self.prefix_cache}


class CpuFacts(Message, frozen=True):
    """What the speed of a worker on a CPU depends on, and what was chosen for it.

    `waiting`: how its threads wait for work. `linears`: the forms that were chosen for linear layers.
    """

    processor: str
    num_cores: int
    num_threads: int
    waiting: str
    linears: str

    def report(self) -> Report:
        return {
            "processor": f"{self.processor}, {self.num_cores} cores",
            "threads": f"{self.num_threads}, {self.waiting}",
            "linears": self.linears,
        }


class MemorySaving(Message, frozen=True):
    """A flag with the value that saves memory, and what it frees beside pages and in each token's page."""

    flag: str
    num_bytes: int
    kv_bytes: int  # of a token in the pool

    def __str__(self) -> str:
        per_token = f" and {self.kv_bytes} bytes a token" if self.kv_bytes else ""
        return f"{self.flag} ({self.num_bytes >> 20} MiB{per_token})"


class CudaFacts(Message, frozen=True):
    """What the memory of a GPU holds.

    `held_bytes`: by purpose ("of target weights"), KV pages left out. `kv_bytes`, `other_bytes`: of one token, in the
    KV caches and beside them. `savings`: in the order in which to try them.
    """

    held_bytes: dict[str, int]
    kv_bytes: int
    other_bytes: int
    savings: tuple[MemorySaving, ...]

    def report(self) -> Report:
        held = ", ".join(f"{num_bytes >> 20} MiB {purpose}" for purpose, num_bytes in self.held_bytes.items())
        others = f" and {self.other_bytes} beside it" if self.other_bytes else ""
        return {
            "memory": f"{held}; {self.kv_bytes} bytes of KV cache a token{others}",
            "to save memory": ", ".join(map(str, self.savings)),
        }


class RankFacts(Message, frozen=True):
    """What a rank of the worker holds: bytes of weights, and of KV pages of target and draft."""

    rank: int
    device: str
    weight_bytes: int
    kv_bytes: int

    def report(self) -> Report:
        return msgspec.structs.asdict(self)

    def __str__(self) -> str:
        return f"{self.rank}: {self.weight_bytes >> 20} MiB of weights, {self.kv_bytes >> 20} MiB of KV pages"


class WorkerFacts(Message, frozen=True, kw_only=True):
    """Sizes, start and speed of the worker.

    `num_pages`: pages that requests may use. `start_s`: seconds from the start of the process, by phase; `graph_s`:
    those of captures, by the part of a step, and of what precedes them. `bytes_per_s`, `flop_per_s`: the device's
    ceilings, 0 where they are not known. `verification`, `acceptance`: how guesses are accepted, and whether acceptance
    is simulated.
    `weight_format`, `draft_weight_format`: of linears in fewer bits than the model computes in; "": there are none.
    """

    device: str
    num_pages: int
    page_size: int  # tokens
    num_slots: int
    chunk_tokens: int
    platform: CpuFacts | CudaFacts
    graph_batch_sizes: tuple[int, ...]
    graph_counts: dict[str, int]  # by the part of a step that they replay
    graph_s: dict[str, float]
    step_widths: tuple[int, ...]
    start_s: dict[str, float]
    bytes_per_s: float
    flop_per_s: float
    verification: str
    acceptance: str
    weight_bytes: int
    draft_weight_bytes: int
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    logit_processor: str = "none"  # MODULE:NAME
    weight_format: str = ""
    draft_weight_format: str = ""
    state_bytes_per_request: int = 0  # of layers that recur
    num_snapshots: int = 0  # of their states, for the prefix cache
    snapshot_bytes: int = 0  # of one
    ranks: tuple[RankFacts, ...] = ()  # of all ranks; the other facts are those of rank 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV pages hold."""
        return self.num_pages * self.page_size

    @property
    def graphs(self) -> str:
        """How many there are of each part of a step, for which batch sizes, and what took how long."""
        sizes, counts, seconds = self.graph_batch_sizes, self.graph_counts, self.graph_s
        if not sizes:
            return "none"
        parts = ", ".join(f"{count} {part} {seconds.get(part, 0):.1f} s" for part, count in counts.items())
        others = "".join(f"; {what} {taken:.1f} s" for what, taken in seconds.items() if what not in counts)
        batches = f"batches of 1 to {sizes[-1]} ({len(sizes)} sizes)"
        return f"{sum(counts.values())} for {batches}: {parts}{others}"

    @property
    def of_ranks(self) -> str:
        """What each rank holds, where there are several."""
        return "; ".join(map(str, self.ranks)) if len(self.ranks) > 1 else "one"

    @property
    def start_up(self) -> str:
        """How long the start took, and each of its phases."""
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.start_s.items())
        return f"{sum(self.start_s.values()):.1f} s: {phases}"

    @property
    def ceilings(self) -> str:
        """The most that the device moves and computes."""
        flop = f"{self.flop_per_s / 1e12:.3g} TFLOP/s" if self.flop_per_s else "FLOP/s not known"
        return f"{self.bytes_per_s / 1e9:.0f} GB/s, {flop}"

    def report(self) -> Report:
        return {
            "device": self.device,
            "tokens": self.num_tokens,
            "pages": self.num_pages,
            "page_size": self.page_size,
            "slots": self.num_slots,
            "chunk_tokens": self.chunk_tokens,
            **self.platform.report(),
            "graphs": self.graphs,
            "step_widths": " ".join(map(str, self.step_widths)),
            "start_up": self.start_up,
            "ceilings": self.ceilings,
            "verification": self.verification,
            "acceptance": self.acceptance,
            "logit_processor": self.logit_processor,
            "weight_format": self.weight_format,
            "draft_weight_format": self.draft_weight_format,
            "weights_mib": self.weight_bytes >> 20,
            "draft_weights_mib": self.draft_weight_bytes >> 20,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "draft_kv_bytes_per_token": self.draft_kv_bytes_per_token,
            "state_bytes_per_request": self.state_bytes_per_request,
            "state_snapshots": self.num_snapshots,
            "bytes_per_state_snapshot": self.snapshot_bytes,
            "ranks": self.of_ranks,
        }


ActorFacts = FrontendFacts | SchedulerFacts | WorkerFacts | RankFacts


class EngineFacts(msgspec.Struct, frozen=True):
    """What all actors of an engine reported."""

    frontend: FrontendFacts
    scheduler: SchedulerFacts
    worker: WorkerFacts

    def report(self) -> dict[str, Any]:
        """By role and name."""
        return {role: getattr(self, role).report() for role in self.__struct_fields__}


class ForwardShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one forward of one model reads and computes.

    `weight_bytes`: read once, the head included, an embedding that is only gathered from left out. `head_flop`: per
    row that gets logits; `row_flop`: per row, everything else but attention; `pair_flop`: per (row, key) of attention.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0  # per token of context
    row_flop: int = 0
    head_flop: int = 0
    pair_flop: int = 0
    state_bytes: int = 0  # of a slot's recurrent layers: read and written once


class Guessing(IntEnum):
    """Which forwards a draft guesses by, once committed tokens are absorbed."""

    STEPS = 0  # one for each guess but the first, or each level
    BLOCK = 1  # one for all
    MASKS = 2  # none: a mask for each guess but the first is in the forward that absorbs


class Roofline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A device's ceilings and the models that run on it. A rate of 0 is not known and bounds nothing.

    Where guesses are trees, a step absorbs `longest` rows of a slot and drafts one level fewer; a level runs
    `draft_rows` nodes of it. `most_guesses`: of them, those that a draft makes, where n-grams make others. A block is
    one draft step of `draft_rows` rows, whatever the window.
    """

    bytes_per_s: float = 0.0
    flop_per_s: float = 0.0
    target: ForwardShape = ForwardShape()
    extend: ForwardShape = ForwardShape()  # the draft model absorbs what was committed
    draft: ForwardShape = ForwardShape()  # one draft step
    longest: int = 0  # tokens that a step can commit; 0: as many as it is wide
    draft_rows: int = 1
    guessing: Guessing = Guessing.STEPS
    most_guesses: int = 0  # of a path; 0: one for each token but the root
