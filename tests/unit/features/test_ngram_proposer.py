"""N-gram guesses: matches, the tree of what followed them, the log of all requests; against ngram_reference.py."""

import json
import random
from pathlib import Path

import pytest
import torch
from overlap_spec_kernels import (
    ALL_BANDS,
    BANDS,
    NgramLog,
    PublishedColumns,
    allocate_log,
    store_tokens,
    with_slots,
)
from overlap_spec_kernels.ngram.ngram_log import PAGE
from support.ngram_inputs import in_bands
from support.no_processors import no_processors
from support.reference.ngram import Limits, accepted, guess
from support.tiny.tokenizer import write_tokenizer
from support.verdicts import unwritten
from tokenizers import Tokenizer
from torch import Tensor

from overlap_spec import features
from overlap_spec.config import NgramSettings, SpecSettings
from overlap_spec.errors import ConfigError
from overlap_spec.features.ngram.worker import (
    MOST_MISSED,
    NgramDraft,
    NgramLimits,
    NgramMemory,
    NgramProposer,
    NgramWindows,
    read_corpus,
)
from overlap_spec.messages import MOST_UNDRAFTED
from overlap_spec.models.interfaces import DraftLog, RowBatch, TargetOutput
from overlap_spec.sampling.context import SAMPLING_WORK, Sampling, TokenPool
from overlap_spec.speculative.interfaces import Prompts, SlotBatch
from overlap_spec.speculative.methods import method_of
from overlap_spec.speculative.verification import REJECTION

NUM_SLOTS, NUM_PAGES, PAGE_SIZE = 3, 60, 16
NOTHING = TargetOutput(torch.zeros(0), torch.zeros(0))
NO_CORPUS = torch.zeros(0, dtype=torch.int32)
NO_ROWS = torch.zeros(0, dtype=torch.int64)
VARIANTS = [
    Limits(),
    Limits(by_frequency=True),
    Limits(min_match=2, max_match=5, branch=6, max_breadth=3),
    Limits(max_match=3, branch=4, max_breadth=1),
    Limits(min_match=3, max_match=8, branch=20, min_breadth=4, max_breadth=4, by_frequency=True),
]
every_variant = pytest.mark.parametrize("limits", VARIANTS)


def sampling() -> Sampling:
    none = torch.zeros(0)
    return Sampling(*[none] * 9, SAMPLING_WORK[0], no_processors(1))


class Requests:
    """A proposer and the requests that it serves, each in a slot. Steps verify nothing: tokens are given."""

    def __init__(
        self, limits: Limits, capacity: int = 1 << 20, num_guesses: int = 11, corpus: Tensor = NO_CORPUS
    ) -> None:
        """`capacity`: by default so large that no two n-grams here share an entry of the index."""
        self.pool = TokenPool.allocate(NUM_SLOTS * NUM_PAGES + 1, PAGE_SIZE, torch.device("cpu"))
        log = with_slots(allocate_log(capacity, self.pool.tokens.device), NUM_SLOTS + 1)
        own = NgramLimits(
            limits.min_match, limits.max_match, limits.branch, limits.min_breadth, limits.max_breadth,
            limits.by_frequency,
        )  # fmt: skip
        self.memory = NgramMemory(own, self.pool, log, corpus, torch.zeros(NUM_SLOTS + 1, dtype=torch.int64))
        self.windows = NgramWindows.allocate(NUM_SLOTS + 1, num_guesses, self.pool.tokens.device)
        self.proposer = NgramProposer(self.memory, self.windows)
        self.num_guesses = num_guesses
        self.tables = torch.zeros(NUM_SLOTS + 1, NUM_PAGES, dtype=torch.int32)
        self.tables[:NUM_SLOTS] = (torch.randperm(NUM_SLOTS * NUM_PAGES) + 1).view(NUM_SLOTS, -1).int()
        self.tokens: dict[int, list[int]] = {}

    def prefill(self, slot: int, tokens: list[int], start: int = 0, completes: bool = True) -> None:
        """A chunk from `start` on; the last of `tokens` is the one drawn, or the prompt's next."""
        positions = torch.arange(start, len(tokens) - 1)
        table = self.tables[slot : slot + 1]
        rows = table[0, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        following = torch.tensor(tokens[start + 1 :])
        slots = torch.tensor([slot if completes else NUM_SLOTS])
        last, chunk_slots = torch.tensor([len(positions) - 1]), torch.tensor([slot])
        prompts = Prompts(
            torch.tensor(tokens[start:-1]), following, last, slots, chunk_slots, torch.tensor([int(start == 0)])
        )
        self.pool.write_chunks(rows, prompts.tokens)
        if completes:
            self.pool.write(table, torch.tensor([len(tokens) - 1]), following[-1:])
        self.proposer.prefill(prompts, RowBatch(positions, rows, table, None, len(positions), False), NOTHING)
        self.tokens[slot] = list(tokens)

    def commit(self, runs: dict[int, list[int]], most: int = 12) -> None:
        """A decode step of these slots."""
        slots = torch.tensor(list(runs))
        lengths = torch.tensor([len(self.tokens[slot]) - 1 for slot in runs])
        committed = torch.tensor([run + [-1] * (most - len(run)) for run in runs.values()])
        counts = torch.tensor([len(run) for run in runs.values()])
        verdict = unwritten(len(slots), PublishedColumns(most))._replace(
            tokens=committed, accept_len=counts - 1, next_positions=(lengths + counts)[None]
        )
        store_tokens(*self.pool.rows_of(self.tables[slots]), lengths + 1, committed, counts)
        self.proposer.extend(
            self.batch(slots, lengths), RowBatch(NO_ROWS, None, self.tables, None, 1, True), NOTHING, verdict
        )
        for slot, run in runs.items():
            self.tokens[slot] += run

    def skip(self, slot: int, run: list[int]) -> None:
        """A step that skips the lookup: its tokens are in the pool, and shared by the next one that does not."""
        start, counts = torch.tensor([len(self.tokens[slot])]), torch.tensor([len(run)])
        store_tokens(*self.pool.rows_of(self.tables[slot : slot + 1]), start, torch.tensor([run]), counts)
        self.tokens[slot] += run

    def batch(self, slots: Tensor, lengths: Tensor) -> SlotBatch:
        return SlotBatch(slots, lengths, self.tables[slots], sampling())

    def propose(self, *slots: int) -> list[tuple[list[int], list[int], int]]:
        """Guesses of each slot as `guess` gives them."""
        chosen = torch.tensor(slots)
        lengths = torch.tensor([len(self.tokens[slot]) - 1 for slot in slots])
        guesses = self.proposer.propose(self.batch(chosen, lengths), NO_ROWS, self.num_guesses)
        parents = guesses.parents if guesses.parents is not None else self.windows.parents[chosen].t()
        chains = torch.arange(self.num_guesses)[:, None].expand_as(guesses.tokens)
        assert guesses.parents is not None or torch.equal(parents[guesses.tokens >= 0], chains[guesses.tokens >= 0])
        found = []
        for row, slot in enumerate(slots):
            count = int((guesses.tokens[:, row] >= 0).sum())
            assert (guesses.tokens[count:, row] == -1).all(), "what is missing is missing at the end"
            found.append(
                (guesses.tokens[:count, row].tolist(), parents[:count, row].tolist(), int(self.windows.strength[slot]))
            )
        return found


@pytest.mark.slow_but_every(6)
@every_variant
@pytest.mark.parametrize("vocabulary", [2, 40])
def test_one_request_is_guessed_as_the_reference_does(limits: Limits, vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    requests = Requests(limits)
    for length in (1, 5, 30, 400):
        tokens = [rng.randrange(vocabulary) for _ in range(length + 1)]
        requests.prefill(0, tokens)
        for _ in range(5):
            assert requests.propose(0) == [guess(tokens, [tokens], limits, 11)]
            run = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 12))]
            requests.commit({0: run})
            tokens = tokens + run
        requests.proposer.forget()


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@every_variant
def test_what_others_said_is_guessed_too(limits: Limits) -> None:
    """One request after the other, in three slots: the log holds them all, the latest last."""
    rng = random.Random(5)
    requests, said = Requests(limits), []
    text = [rng.randrange(30) for _ in range(400)]
    for number in range(8):
        start = rng.randrange(300)
        tokens = text[start : start + rng.randint(3, 60)] + [rng.randrange(30)]
        requests.prefill(number % NUM_SLOTS, tokens)
        said.append(tokens)
        for _ in range(6):
            run = [
                rng.choice([text[(start + len(tokens)) % 400], rng.randrange(30)]) for _ in range(rng.randint(1, 12))
            ]
            assert requests.propose(number % NUM_SLOTS) == [guess(said[-1], said, limits, 11)]
            requests.commit({number % NUM_SLOTS: run})
            said[-1] = said[-1] + run


def test_a_prompt_in_chunks_over_cached_pages_is_known_whole() -> None:
    """The second request starts where the cached pages of the first end, and its chunks end anywhere."""
    rng = random.Random(1)
    requests = Requests(Limits())
    prompt = [rng.randrange(10) for _ in range(150)]
    requests.prefill(0, prompt)
    requests.tables[1, : 96 // PAGE_SIZE] = requests.tables[0, : 96 // PAGE_SIZE]
    other = prompt[:96] + [rng.randrange(10) for _ in range(80)]
    requests.prefill(1, other[:112], start=96, completes=False)
    requests.prefill(1, other[:131], start=111, completes=False)
    requests.prefill(1, other, start=130)
    assert requests.propose(1) == [guess(other, [prompt, other], Limits(), 11)]


def test_what_is_committed_is_guessed_in_the_same_step_and_by_others_in_the_next() -> None:
    requests = Requests(Limits())
    requests.prefill(0, [1, 2, 3])
    requests.prefill(1, [4, 5, 6])
    assert requests.propose(0, 1) == [([], [], 0)] * 2
    requests.commit({0: [50, 51, 52, 50], 1: [7]})
    own, other = requests.propose(0, 1)
    assert own[0][:3] == [51, 52, 50] and other == ([], [], 0)
    requests.commit({1: [51]})
    assert requests.propose(1) == [([52, 50], [0, 1], 1)], "what slot 0 said a step ago"


def test_a_log_that_is_full_forgets_the_oldest() -> None:
    limits = Limits(min_match=4)
    requests = Requests(limits, capacity=4 * PAGE)
    assert requests.memory.log.tokens.numel() == 4 * PAGE
    texts = [list(range(1000 * number, 1000 * number + 100)) for number in range(1, 8)]
    for text in texts:
        requests.prefill(0, text)  # a page each
    asked = {}
    for number, text in enumerate(texts):
        requests.prefill(1, [number, *text[50:60]])
        asked[number] = requests.propose(1)[0][0]
        assert requests.memory.log.tokens.numel() == 4 * PAGE
    assert asked[0] == asked[1] == asked[2] == [], "long gone"
    requests = Requests(limits, capacity=4 * PAGE)
    for text in texts:
        requests.prefill(0, text)
    requests.prefill(1, [0, *texts[-1][50:60]])
    assert requests.propose(1)[0][0] == texts[-1][60:71]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [PAGE, 2 * PAGE, 3 * PAGE])
def test_a_log_smaller_than_what_is_said_at_once_gives_own_guesses_still(capacity: int) -> None:
    rng = random.Random(3)
    limits = Limits(min_match=3)
    requests = Requests(limits, capacity)
    for _ in range(2):
        for slot in range(NUM_SLOTS):
            requests.prefill(slot, [rng.randrange(6) for _ in range(600)])
        for _ in range(20):
            requests.commit({slot: [rng.randrange(6) for _ in range(12)] for slot in range(NUM_SLOTS)})
            found = requests.propose(0, 1, 2)
            for slot, (tokens, parents, strength) in enumerate(found):
                assert all(parent <= column for column, parent in enumerate(parents))
                assert len(set(zip(tokens, parents, strict=True))) == len(tokens), "siblings are distinct"
                assert strength >= guess(requests.tokens[slot], [[]], limits, 11)[2]


def test_forgotten_is_what_others_said_and_not_what_a_request_itself_did() -> None:
    requests = Requests(Limits())
    requests.prefill(0, [1, 2, 3, 4, 5])
    requests.prefill(1, [8, 2, 9, 8, 2])
    requests.proposer.forget()
    assert requests.propose(1)[0][0][:2] == [9, 8]
    requests.prefill(2, [6, 3])
    assert requests.propose(2) == [([], [], 0)]
    requests.commit({1: [9, 8]})
    requests.prefill(2, [6, 9])
    assert requests.propose(2)[0][0] == [8], "what is said from then on is shared again"


def test_a_lookahead_says_what_was_promised_and_what_became_of_it() -> None:
    requests = Requests(Limits(), num_guesses=4)
    requests.prefill(0, [1, 2, 3, 4, 1, 2])
    ((tokens, _, strength),) = requests.propose(0)
    assert (tokens, strength) == ([3, 4, 1, 2], 2)
    batch = requests.batch(torch.tensor([0]), torch.tensor([5]))

    def lookahead(committed: list[int]) -> tuple[int, ...]:
        accept_len = len(committed) - 1 - committed.count(-1)
        requests.windows.levels[0] = 4
        verdict = unwritten(1, PublishedColumns(len(committed), is_self_drafting=True))._replace(
            tokens=torch.tensor([committed]), accept_len=torch.tensor([accept_len])
        )
        requests.proposer.report(batch, verdict, verdict.published.guess_report)
        return tuple(verdict.published.guess_report[0].tolist())

    assert lookahead([3]) == (4, 2, 1), "a step of width 1 would have had a guess right"
    assert lookahead([9]) == (4, 2, 0)
    assert lookahead([3, 4]) == (4, 2, 2), "in the column after"
    assert lookahead([3, 9]) == (4, 2, 0)
    assert lookahead([3, 4, 1, 2, 7]) == (4, 2, 0), "nothing was guessed there"
    assert requests.windows.levels.tolist()[:2] == [-1, 0], "it is told once"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [20, 225, 240, 250])
def test_what_steps_at_rest_commit_is_shared_later(prompt: int) -> None:
    """The log is the same, inside a page and across two."""
    torch.manual_seed(1)
    assert MOST_MISSED >= MOST_UNDRAFTED
    shared, skipped = Requests(Limits()), Requests(Limits())
    skipped.tables = shared.tables
    tokens = torch.randint(0, 50, (prompt + 41,)).tolist()
    for requests in (shared, skipped):
        requests.prefill(0, tokens[:prompt])
        for step in range(20):
            run = tokens[prompt + 2 * step : prompt + 2 * step + 2]
            requests.skip(0, run) if requests is skipped and step % 8 else requests.commit({0: run})
        requests.commit({0: tokens[-1:]})
    pages = int(shared.memory.log.opened)
    inside = torch.arange(shared.memory.log.tokens.shape[1]) < shared.memory.log.fill[:pages, None]
    said = [each.memory.log.tokens[:pages].masked_fill(~inside, -1) for each in (shared, skipped)]
    assert torch.equal(*said) and inside.sum() >= prompt + 41
    for name in ("fill", "opened", "open_page", "places"):
        assert torch.equal(getattr(shared.memory.log, name), getattr(skipped.memory.log, name)), name


@pytest.mark.slow_but_every(5)
@every_variant
def test_an_owner_is_guessed_as_if_it_were_alone(limits: Limits) -> None:
    """Three owners say parts of one text, in turn in three slots; each is guessed by what it said itself."""
    rng = random.Random(7)
    requests, text = Requests(limits), [rng.randrange(30) for _ in range(200)]
    said: dict[int, list[list[int]]] = {0: [], 1: [], 1 << 40: []}
    for number in range(12):
        slot, owner = number % NUM_SLOTS, rng.choice(list(said))
        start = rng.randrange(150)
        tokens = text[start : start + rng.randint(20, 45)] + [rng.randrange(30)]
        requests.memory.log.owner[slot] = owner
        requests.prefill(slot, tokens)
        for _ in range(4):
            own = [*said[owner], tokens]
            assert requests.propose(slot) == [guess(tokens, own, limits, 11)]
            run = [rng.randrange(30) for _ in range(rng.randint(1, 5))]
            requests.commit({slot: run})
            tokens = tokens + run
        said[owner].append(tokens)


def test_no_hash_leads_to_what_another_owner_said() -> None:
    """Every entry of the index leads to the same place, as if all hashes were the same."""
    requests = Requests(Limits())
    for slot, owner in enumerate((1, 2, 1)):
        requests.memory.log.owner[slot] = owner
    requests.prefill(0, [7, 8, 9, 10])
    requests.prefill(1, [6, 8])
    requests.prefill(2, [5, 8])
    requests.memory.log.places.fill_(int(requests.memory.log.places.max()))
    requests.tokens[0] = [7, 8, 9]
    assert [len(found[0]) for found in requests.propose(1)] == [0]
    requests.prefill(1, [6, 9])
    requests.prefill(2, [5, 9])
    requests.memory.log.places.fill_(1 + requests.memory.limits.context + 2)
    assert requests.propose(1) == [([], [], 0)]
    assert requests.propose(2) == [([10], [0], 1)]


@pytest.mark.parametrize("owner", [0, 1])
def test_a_page_that_another_owner_has_opened_is_not_written_on(owner: int) -> None:
    requests = Requests(Limits())
    requests.memory.log.owner[0] = 1
    requests.prefill(0, [1, 2, 3])
    requests.memory.log.owner[0] = owner
    requests.commit({0: [4]})
    assert int(requests.memory.log.opened) == (1 if owner else 2)


def halves(log: NgramLog, owners: tuple[int, ...]) -> None:
    """Slot 0 has the one half of the log, the others the other one."""
    log.stride.fill_(BANDS)
    for slot, owner in enumerate(owners):
        log.owner[slot] = owner
        log.bands[slot] = in_bands(*range(8) if slot == 0 else range(8, 16))


def found_of(requests: Requests, texts: list[list[int]]) -> int:
    """How many of the texts slot 0 guesses from the middle on."""
    count = 0
    for number, text in enumerate(texts):
        requests.prefill(0, [number, *text[50:60]])
        count += requests.propose(0)[0][0][:1] == text[60:61]
    return count


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_client_that_floods_the_log_evicts_its_own(is_divided: bool) -> None:
    """Else it evicts all that others said. Each half has room for 32 pages."""
    requests = Requests(Limits(min_match=4), capacity=64 * PAGE)
    if is_divided:
        halves(requests.memory.log, (1, 2, 2, 2))
    else:
        requests.memory.log.owner[:] = torch.tensor([1, 2, 2, 2])
    texts = [list(range(1000 * number, 1000 * number + 100)) for number in range(1, 9)]
    for text in texts:
        requests.prefill(0, text)
    assert found_of(requests, texts) == 8
    flood = [list(range(100_000 + 1000 * number, 100_100 + 1000 * number)) for number in range(70)]
    for text in flood:
        requests.prefill(1, text)
    assert (requests.memory.log.owners == 2).sum() == (32 if is_divided else 64)
    requests.prefill(1, [0, *flood[-1][50:60]])
    assert requests.propose(1)[0][0][:1] == flood[-1][60:61], "it finds what it said last"
    assert found_of(requests, texts) == (8 if is_divided else 0)


def test_entries_of_the_index_are_in_the_bands_of_their_slot() -> None:
    requests = Requests(Limits(), capacity=64 * PAGE)
    halves(requests.memory.log, (1, 2, 2, 2))
    for slot, bands in ((0, range(8)), (1, range(8, 16))):
        requests.memory.log.places.zero_()
        requests.prefill(slot, list(range(100)))
        used = requests.memory.log.places.view(-1, BANDS).count_nonzero(0)
        assert set(used.nonzero().flatten().tolist()) == set(bands)


def test_a_half_of_the_log_is_used_as_a_whole() -> None:
    """Its pages are taken one after the other: all of its rows are written, though only every 16th number is taken."""
    requests = Requests(Limits(min_match=4), capacity=64 * PAGE)
    halves(requests.memory.log, (1, 2, 2, 2))
    texts = [list(range(1000 * number, 1000 * number + 100)) for number in range(1, 33)]
    for text in texts:
        requests.prefill(1, text)
    assert (requests.memory.log.owners == 2).sum() == 32
    requests.memory.log.stride.fill_(1)
    requests.memory.log.bands[:] = ALL_BANDS
    for number in range(64):
        requests.prefill(0, [number, 1, 2])
    assert (requests.memory.log.owners == 1).all(), "alone again"


def test_the_references_walk() -> None:
    assert accepted([5, 6, 7], [0, 0, 2], [6, 7, 5]) == 2
    assert accepted([], [], [6]) == 0


def test_a_corpus_is_known_from_the_start_and_after_a_flush(tmp_path: Path) -> None:
    texts = ["the quick brown fox jumps over the lazy dog", "a lazy dog sleeps", "she sells sea shells"]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    directory = write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    corpus = read_corpus(str(tmp_path / "corpus.jsonl"), str(directory), 10_000)
    assert corpus.tolist() == [token for ids in encoded for token in (*ids, -1)]
    assert len(read_corpus(str(tmp_path / "corpus.jsonl"), str(directory), 7)) == 7
    requests = Requests(Limits(min_match=3), corpus=corpus)
    for _ in range(2):
        requests.memory.forget()
        requests.prefill(0, [3, *encoded[0][4:9]])
        (found,) = requests.propose(0)
        assert found[0][:3] == encoded[0][9:12]
        requests.prefill(0, [3, *encoded[1][-4:]])
        assert requests.propose(0) == [([], [], 0)], "a text ends where it ends"


@pytest.mark.parametrize("line", ["[1, 2]", "not JSON"])
def test_a_bad_corpus_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(f'"good"\n{line}\n')
    with pytest.raises(ConfigError, match=r"^--[a-z-]+corpus-path: \S+corpus.jsonl, line 2: each line must be"):
        read_corpus(str(tmp_path / "corpus.jsonl"), str(write_tokenizer(tmp_path)), 100)


def test_its_method_is_the_features() -> None:
    given = features.listed(features.WORKER, "METHODS")
    spec = SpecSettings("NGRAM", None, 11, 10, 12, ngram=NgramSettings(capacity=4096))
    method = method_of(spec, given)
    assert method.name == "NGRAM" and REJECTION not in method.verifications
    with pytest.raises(ConfigError, match="must be one of NONE, .*, STANDALONE, .*, got 'NGRAM'"):
        method_of(spec)


def test_what_it_loads_is_a_log_whose_flag_makes_it_shorter() -> None:
    profile = NgramDraft.of(NgramSettings(capacity=10_000), 11, torch.device("cpu")).profile
    assert profile.num_bytes == profile.log.num_bytes > 0
    assert (profile.log.flag, profile.log.capacity) == ("--speculative-ngram-capacity", 10_000)
    assert profile.log.of_capacity(1_000) == DraftLog(profile.num_bytes // 10, 1_000, profile.log.flag)
