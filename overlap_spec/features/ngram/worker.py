"""N-grams as a method, and the owners of their log.

A request finds what requests of its owner have said, and writes in its bands.

The proposer guesses that what followed the last tokens before will follow them again: no draft model (prompt lookup,
n-grams). It has two memories:

    own       the token pool, addressed as the KV cache is: a prompt whose KV is cached, or comes in chunks, is there
              as whole as its KV is. Every step writes it. Searched in full, in time
    shared    a bounded log of what all requests said, with an index of n-grams. Prompts enter it whole, when they are
              complete; what a step commits enters it before that step's guesses are made. A request finds what those
              of its owner have said; a slot's owner is written by the hook beside this

Guesses cost next to nothing, so a whole window is filled after every step, and its lookahead goes out with the next
step's tokens: the width policy sees how good guesses are that were never verified. Next to nothing is still a fifth of
a small model's step: while guesses do not pay, steps skip the lookup, and share nothing; the next that looks up makes
up for them.

A corpus, texts of a JSONL file, is known before the first request. Each line is a JSON string. Texts follow
one another with -1 in between, which equals no token, so nothing that is matched or guessed goes from one into the
next. What is flushed with the cache is entered again.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from overlap_spec_kernels import (
    ALL_BANDS,
    BANDS,
    NgramLimits,
    NgramLog,
    allocate_log,
    clear_log,
    ngram_absorb,
    ngram_lookahead,
    ngram_match,
    ngram_merge,
    with_slots,
)
from tokenizers import Tokenizer
from torch import Tensor

from overlap_spec.config import NGRAM, NgramSettings, SpecSettings
from overlap_spec.errors import ConfigError
from overlap_spec.features.ngram import DividedLog
from overlap_spec.messages import Extension, Owner, StepPlan
from overlap_spec.models.interfaces import (
    DraftLog,
    DraftProfile,
    LoadedTarget,
    Progress,
    RowBatch,
    TargetOutput,
    TreeShape,
)
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.sampling.context import TokenPool
from overlap_spec.speculative.drafts import ChainDraft, EngineShape, LoadedProposer
from overlap_spec.speculative.interfaces import Guesses, Prompts, Proposer, SlotBatch, Verdict
from overlap_spec.speculative.methods import Method
from overlap_spec.speculative.proposers.block import BlockDraft
from overlap_spec.speculative.proposers.parallel import ParallelDraft
from overlap_spec.speculative.verification import REJECTION, VERIFICATIONS
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Device, Packer
from overlap_spec.worker.hooks import StepHook

CAPACITY_FLAG = "--speculative-ngram-capacity"
FIELD = "speculative_ngram_external_corpus_path"
PAGE_SIZE, CHUNK = 16, 1 << 16  # of the tokens that are entered at once, as if they were a request's


def read_corpus(path: str, tokenizer_dir: str, most: int) -> Tensor:
    """At most `most` tokens, separators included. Shapes: -> [n] i32. Raises: ConfigError saying what is wrong."""
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))
    tokens = array("i")
    for text in _texts(path):
        tokens.extend(tokenizer.encode(text, add_special_tokens=False).ids)
        tokens.append(-1)
        if len(tokens) >= most:
            break
    if not tokens:
        raise ConfigError(FIELD, f"{path} holds no text")
    return torch.frombuffer(tokens[:most], dtype=torch.int32).clone()


def _texts(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _text_in(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from None


def _text_in(line: str, origin: str) -> str:
    if not line.strip():
        return ""
    try:
        text = json.loads(line)
    except ValueError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(FIELD, f"{origin}: each line must be a JSON string")
    return text


def enter_corpus(log: NgramLog, limits: NgramLimits, corpus: Tensor) -> None:
    """Enter it, a chunk at a time; it is older than all that requests say, and no particular owner's.

    Shapes: corpus [n] i32.
    """
    log, dummy, first = with_slots(log, 2), 1, torch.zeros(1, dtype=torch.int64, device=corpus.device)
    table = torch.arange(CHUNK // PAGE_SIZE, dtype=torch.int32, device=corpus.device)[None]
    for chunk in corpus.split(CHUNK):
        pool = torch.nn.functional.pad(chunk, (0, CHUNK - len(chunk)), value=-1)
        ngram_absorb(log, limits, pool, table, PAGE_SIZE, first, first, first + (len(chunk) - 1), dummy, len(chunk))


MOST_MISSED = 32  # tokens: of steps that skipped the lookup, `MOST_UNDRAFTED` of the messages


@dataclass(frozen=True)
class NgramWindows:
    """The guesses of each slot's window, K for S slots, to tell what became of them."""

    tokens: Tensor  # [S, K] i64, -1: none
    parents: Tensor  # [S, K] i64, window columns
    levels: Tensor  # [S] i64: of the deepest guess; -1 once the window was told of
    strength: Tensor  # [S] i64: tokens of the longest match

    @staticmethod
    def allocate(num_rows: int, num_guesses: int, device: torch.device) -> "NgramWindows":
        """For slot rows 0..num_rows - 1."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        return NgramWindows(
            zeros(num_rows, num_guesses), zeros(num_rows, num_guesses), zeros(num_rows), zeros(num_rows)
        )


@dataclass(frozen=True)
class NgramMemory:
    """What is remembered of tokens."""

    limits: NgramLimits
    pool: TokenPool
    log: NgramLog  # with a row of `open_page` for each slot row, the dummy last
    corpus: Tensor  # [n] i32: what is in the log from the start, and again after it was forgotten
    newest: Tensor  # [S] i64: the last position of each slot that is in the log

    @property
    def dummy(self) -> int:
        """The dummy's slot row."""
        return len(self.log.open_page) - 1

    def forget(self) -> None:
        """Keep the corpus alone, and requests' own tokens."""
        clear_log(self.log)
        self.enter_corpus()

    def enter_corpus(self) -> None:
        """Put what is known from the start into the log."""
        if len(self.corpus):
            enter_corpus(self.log, self.limits, self.corpus)

    def share(self, page_table: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, most: int) -> None:
        """Into the log, from the pool: at most `most` tokens of a slot, at positions starts..ends."""
        known = self.pool.rows_of(page_table)
        ngram_absorb(self.log, self.limits, *known, slots, starts, ends, self.dummy, most)


class NgramProposer:
    """A `SelfDrafting` and a `Proposer[None]`: all that it knows is in its memory."""

    def __init__(self, memory: NgramMemory, windows: NgramWindows) -> None:
        self.memory = memory
        self._windows = windows
        self._chains = memory.limits.max_breadth == 1

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> None:
        """Share the prompts that are complete, with the tokens drawn after them."""
        ends = rows.positions[prompts.last_rows] + 1
        self.memory.newest.index_copy_(0, prompts.slots, ends)
        most = rows.page_table.shape[1] * self.memory.pool.page_size
        self.memory.share(rows.page_table, prompts.slots, torch.zeros_like(ends), ends, most)

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Share what was committed, by this step and by those before it that skipped the lookup."""
        newest, ends = self.memory.newest, verdict.next_lengths
        starts, most = newest.index_select(0, batch.slots) + 1, verdict.tokens.shape[1] + MOST_MISSED
        self.memory.share(batch.page_table, batch.slots, starts, ends, most)
        newest.index_copy_(0, batch.slots, ends)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Nothing ever waits."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Nothing was missed."""

    def propose(self, batch: SlotBatch, learnt: None, num_guesses: int) -> Guesses:
        """What followed the best matches, own and others'."""
        memory, windows = self.memory, self._windows
        known = memory.pool.rows_of(batch.page_table)
        matches = ngram_match(*known, batch.lengths, memory.limits)
        merged = ngram_merge(matches, memory.log, memory.limits, *known, batch.slots, batch.lengths, num_guesses)
        windows.tokens[batch.slots] = merged.tokens.t()
        windows.parents[batch.slots] = merged.parents.t()
        windows.levels[batch.slots] = merged.levels
        windows.strength[batch.slots] = merged.strength
        return Guesses(merged.tokens, None if self._chains else merged.parents)

    def report(self, batch: SlotBatch, verdict: Verdict, out: Tensor) -> None:
        windows = self._windows
        whole = windows.tokens, windows.parents, windows.levels, windows.strength
        ngram_lookahead(*whole, batch.slots, verdict.tokens, verdict.last, out)

    def forget(self) -> None:
        self.memory.forget()


@dataclass(frozen=True)
class NgramDraft:
    """What n-gram guessing loads: its limits, and the log. It drafts trees, or chains where no node has two children.

    The log takes its memory at load, as weights do, so that KV pages get what it leaves.
    """

    limits: NgramLimits
    log: NgramLog
    num_guesses: int
    corpus: Tensor  # [n] i32
    capacity: int  # tokens of the log

    @staticmethod
    def of(asked: NgramSettings, num_guesses: int, place: torch.device) -> "NgramDraft":
        """Take the log's memory, and read what it begins with. Raises: ConfigError."""
        limits = NgramLimits(
            min_match=asked.min_match,
            max_match=asked.max_match,
            branch=asked.branch,
            min_breadth=asked.min_breadth,
            max_breadth=asked.max_breadth,
            by_frequency=asked.by_frequency,
        )
        corpus = torch.zeros(0, dtype=torch.int32)
        if asked.corpus is not None:
            assert asked.tokenizer_dir is not None, "resolve() lets no corpus through without a tokenizer"
            corpus = read_corpus(asked.corpus, asked.tokenizer_dir, asked.corpus_tokens)
        return NgramDraft(limits, allocate_log(asked.capacity, place), num_guesses, corpus.to(place), asked.capacity)

    @property
    def profile(self) -> DraftProfile:
        """Guesses are not drawn at random. What is taken at load is the log, and what it begins with."""
        num_bytes = self.log.num_bytes + self.corpus.numel() * self.corpus.element_size()
        return DraftProfile(
            num_bytes=num_bytes,
            log=DraftLog(num_bytes, self.capacity, CAPACITY_FLAG),
            tree=None if self.limits.max_breadth == 1 else TreeShape(self.num_guesses),
            reads_hidden=False,
        )

    def attach(self, cache: KVCache, shape: EngineShape) -> NgramProposer:
        log = with_slots(self.log, shape.num_rows)
        newest = torch.zeros(shape.num_rows, dtype=torch.int64, device=shape.device)
        memory = NgramMemory(self.limits, shape.token_pool, log, self.corpus, newest)
        memory.enter_corpus()
        return NgramProposer(memory, NgramWindows.allocate(shape.num_rows, self.num_guesses, shape.device))


class FusedProposer:
    """A `Proposer`: another one's chain, and beside it what followed the last tokens of the same request before.

        root - a - b - c    the draft's chain
             - x - y        the copy: what both begin with is in the chain, and the copy goes on from there

    It looks the request's own tokens up alone. A window's columns are the chain's, then the copy's.
    """

    def __init__(self, inner: Proposer[Any], draft: "FusedDraft", shape: EngineShape) -> None:
        self._inner = inner
        self._draft = draft
        self._pool = shape.token_pool
        self._log = with_slots(allocate_log(1, shape.device), shape.num_rows)  # nothing is ever in it
        self.prefill = inner.prefill
        self.extend = inner.extend
        self.defer = inner.defer
        self.catch_up = inner.catch_up

    def propose(self, batch: SlotBatch, learnt: Any, num_guesses: int) -> Guesses:
        """In a narrow window the chain alone, or its beginning."""
        chain = self._inner.propose(batch, learnt, min(self._draft.num_steps, num_guesses)).tokens
        if num_guesses <= len(chain):
            return with_branch(chain, chain[:0])
        known, limits = self._pool.rows_of(batch.page_table), self._draft.limits
        matches = ngram_match(*known, batch.lengths, limits)
        count = num_guesses - len(chain)
        copied = ngram_merge(matches, self._log, limits, *known, batch.slots, batch.lengths, count)
        return with_branch(chain, copied.tokens)


def with_branch(chain: Tensor, copied: Tensor) -> Guesses:
    """Both as one tree, siblings distinct. Sync: never. Shapes: chain [K, B] i64, copied [N, B] i64."""
    depth, count = len(chain), len(copied)
    column = torch.arange(depth + count, device=chain.device)[:, None].expand(-1, chain.shape[1])  # before each guess
    common = min(depth, count)
    agreed = (chain[:common] == copied[:common]).long().cumprod(0).sum(0)  # [B]: so many leading guesses
    place = column[:count]
    parents = torch.where(place == agreed, agreed, column[depth:]).masked_fill(place < agreed, 0)
    tokens = torch.cat((chain, copied.masked_fill(place < agreed, -1)))
    return Guesses(tokens, torch.cat((column[:depth], parents)))


@dataclass(frozen=True)
class FusedDraft:
    """Another draft's chains, with a branch of `num_copied` guesses (`LoadedProposer`)."""

    chain: ChainDraft | BlockDraft | ParallelDraft
    num_steps: int  # guesses of the chain
    num_copied: int

    @property
    def limits(self) -> NgramLimits:
        """Of matches: the defaults, of chains."""
        default = NgramSettings()
        return NgramLimits(default.min_match, default.max_match, max(default.branch, self.num_copied), 1, 1, False)

    @property
    def profile(self) -> DraftProfile:
        """Windows are trees, of whose guesses no distribution is kept."""
        levels = max(self.num_steps, self.num_copied)
        tree = TreeShape(levels, 0, 1, self.num_steps, self.num_copied, "--speculative-fuse-ngram")
        return replace(self.chain.profile, tree=tree, draft_vocab_size=0)

    def attach(self, cache: KVCache, shape: EngineShape) -> FusedProposer:
        return FusedProposer(self.chain.attach(cache, shape), self, shape)


def fuse(spec: SpecSettings, draft: LoadedProposer) -> LoadedProposer | None:
    """The draft with a branch beside its chains, if that is asked for. Raises: ConfigError if it guesses no such."""
    if not spec.num_copied:
        return None
    if not isinstance(draft, ChainDraft | BlockDraft | ParallelDraft):
        raise ConfigError("speculative_fuse_ngram", f"the draft of {spec.method} cannot have a branch beside its chain")
    return FusedDraft(draft, spec.num_steps, spec.num_copied)


UNOWNED = Owner(0, ALL_BANDS)


def _load(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return NgramDraft.of(spec.ngram, spec.width - 1, target.embedding.device)


METHODS = (
    Method(
        NGRAM,
        key_lookahead=0,
        load=_load,
        verifications=tuple(each for each in VERIFICATIONS if each is not REJECTION),  # no guess is drawn at random
    ),
)


def attach(parts: Parts) -> StepHook | None:
    """Divide the log, if the method has it."""
    proposer = parts.method.proposer
    return OwnedSlots(proposer.memory.log, parts.device) if isinstance(proposer, NgramProposer) else None


class OwnedSlots(StepHook):
    """Notes whose request takes a slot; without salts nothing is launched."""

    def __init__(self, log: NgramLog, device: Device) -> None:
        self._log = log
        self._device = device
        self._owners: dict[int, Owner] = {}  # by slot, of those that have one

    def changed(self, plan: StepPlan) -> None:
        """A slot keeps its owner until the next request takes it. Audits guess nothing: theirs are not in the log."""
        num_slots = len(self._log.owner)
        resets = {slot: reset.owner for slot, reset in plan.resets.items() if slot < num_slots}
        changed = {slot: owner for slot, owner in resets.items() if owner != self._owners.get(slot)}
        if not changed:
            return
        for slot, owner in changed.items():
            self._owners.pop(slot, None)
            if owner is not None:
                self._owners[slot] = owner
        owners = [owner or UNOWNED for owner in changed.values()]
        is_divided = any(owner.bands != ALL_BANDS for owner in self._owners.values())
        packer = Packer()
        packer.add(changed)
        packer.add([owner.number for owner in owners])
        packer.add([owner.bands for owner in owners])
        packer.add([BANDS if is_divided else 1])
        slots, numbers, bands, stride = packer.upload(self._device)
        self._log.owner.index_copy_(0, slots, numbers)
        self._log.bands.index_copy_(0, slots, bands)
        self._log.stride.copy_(stride)

    def ready(self) -> Sequence[Extension]:
        """The scheduler may let in requests with salts."""
        return (DividedLog(),)
