"""What `bench methods` is to run: prompts, loads and sizes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from overlap_spec import hub
from overlap_spec.bench.methods_load import Tokens
from overlap_spec.bench.methods_records import PLAIN_RECORD, Drafts, MethodRecord
from overlap_spec.bench.workload import RANDOM, Workload, chat_prompts, load_prompts, random_prompts
from overlap_spec.config import EngineConfig
from overlap_spec.messages import SamplingParams

NUM_RANDOM = 20  # of the prompts named `random`
ROOM = 256  # tokens for a request beside its own: windows in flight, pages that are not full

Cell = tuple[str, int]  # name of the prompts, batch size


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how thoroughly. `starts_at_once`: engines that start together, to save time."""

    records: tuple[MethodRecord, ...]
    drafts: Drafts
    num_prompts: int | None = None
    num_runs: int = 2
    starts_at_once: int = 1


@dataclass
class Session:
    """What all methods of a run share. `plain`: its tok/s by cell; `reference`: its answers at the smallest batch."""

    workload: Workload
    num_runs: int
    prompts: Mapping[str, Sequence[Tokens]]
    plain: dict[Cell, float] = field(default_factory=dict)
    reference: dict[str, list[Tokens]] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every load."""
        return tuple((name, batch) for name in self.prompts for batch in self.batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """Ascending: the smallest comes first, as the others' answers are compared with its."""
        return sorted(set(self.workload.batch_sizes))

    @property
    def sampling(self) -> SamplingParams:
        """Up to the end of the turn."""
        return SamplingParams(max_new_tokens=self.workload.num_tokens, temperature=self.workload.temperature, seed=0)


@dataclass(frozen=True)
class Job:
    """What one engine does."""

    record: MethodRecord
    cells: tuple[Cell, ...]
    num_runs: int


def jobs_of(records: Sequence[MethodRecord], session: Session) -> Iterator[Job]:
    """Plain decoding first.

    A method that learns from its answers has a fresh engine for every batch size, and one run of it: else it would be
    asked what it has answered before.
    """
    for record in (PLAIN_RECORD, *records):
        if record.learns:
            for size in session.batch_sizes:
                yield Job(record, tuple(cell for cell in session.cells if cell[1] == size), 1)
        else:
            yield Job(record, session.cells, session.num_runs)


def groups_of(jobs: Iterable[Job], together: int) -> Iterator[list[Job]]:
    """Jobs whose engines start together, so many at most, in their order.

    An engine that may narrow its steps measures at its start what they cost, and so starts by itself.
    """
    group: list[Job] = []
    for job in jobs:
        alone = job.record.adaptive or (job.record.num_steps is None and job.record != PLAIN_RECORD)
        if group and (alone or len(group) == together):
            yield group
            group = []
        group.append(job)
        if alone:
            yield group
            group = []
    if group:
        yield group


def prompts_of(config: EngineConfig, workload: Workload, most: int | None) -> dict[str, list[Tokens]]:
    """Token ids of every set of prompts, by its name."""
    prompts = {}
    for name in workload.prompts.split(","):
        if name == RANDOM:
            files = hub.resolve_model(replace(config, skip_tokenizer_init=True))
            prompts[name] = random_prompts(NUM_RANDOM, files.vocab_size)[:most]
        else:
            prompts[name] = chat_prompts(config, load_prompts(name)[:most])
    return prompts


def bounded(config: EngineConfig, session: Session) -> EngineConfig:
    """No tokenizer and no prefix cache, and no larger than the largest batch needs, where no sizes were given."""
    config = replace(config, skip_tokenizer_init=True, disable_radix_cache=True)
    longest = max(len(prompt) for prompts in session.prompts.values() for prompt in prompts)
    most = longest + session.workload.num_tokens + ROOM
    running = config.max_running_requests or session.batch_sizes[-1]
    return replace(
        config,
        max_running_requests=running,
        max_total_tokens=config.max_total_tokens or running * most,
        context_length=config.context_length or min(most, hub.resolve_model(config).context_length),
    )
