"""Plans a run of `bench methods`: its jobs, prompts, loads and sizes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from overlap_spec import hub
from overlap_spec.bench.methods_load import Tokens
from overlap_spec.bench.methods_records import PLAIN_RECORD, Drafts, MethodRecord
from overlap_spec.bench.workload import RANDOM, Workload, chat_prompts, load_prompts, random_prompts
from overlap_spec.config import EngineConfig
from overlap_spec.messages import SamplingParams

NUM_RANDOM = 20  # number of prompts in the set `random`
ROOM = 256  # extra KV tokens per request: windows in flight, pages that are not full

Cell = tuple[str, int]  # name of the prompts, batch size


@dataclass(frozen=True)
class Comparison:
    """The methods and loads to compare, and the number of runs. `starts_at_once`: engines that start together."""

    records: tuple[MethodRecord, ...]
    drafts: Drafts
    num_prompts: int | None = None
    num_runs: int = 2
    starts_at_once: int = 1


@dataclass
class Session:
    """Data that all methods of a run share.

    `plain`: tok/s of plain decoding by cell; `reference`: its answers at the smallest batch.
    """

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
        """Batch sizes in ascending order: answers of the others are compared with those of the smallest."""
        return sorted(set(self.workload.batch_sizes))

    @property
    def sampling(self) -> SamplingParams:
        """Greedy sampling up to the end of the turn."""
        return SamplingParams(max_new_tokens=self.workload.num_tokens, temperature=self.workload.temperature, seed=0)


@dataclass(frozen=True)
class Job:
    """The loads that one engine runs."""

    record: MethodRecord
    cells: tuple[Cell, ...]
    num_runs: int


def jobs_of(records: Sequence[MethodRecord], session: Session) -> Iterator[Job]:
    """The jobs of a run, plain decoding first.

    A method that learns from its answers gets a new engine for every batch size, and a single run: otherwise it would
    meet prompts that it has already answered.
    """
    for record in (PLAIN_RECORD, *records):
        if record.learns:
            for size in session.batch_sizes:
                yield Job(record, tuple(cell for cell in session.cells if cell[1] == size), 1)
        else:
            yield Job(record, session.cells, session.num_runs)


def groups_of(jobs: Iterable[Job], together: int) -> Iterator[list[Job]]:
    """Group jobs, in order, whose engines start together, at most `together` in a group.

    An engine with adaptive widths measures its step costs at start, so it starts alone.
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
    """The config without tokenizer and prefix cache; sizes that were not given are those of the largest batch.

    Unless asked for, nothing is audited: an idle engine would audit on the device on which another one is measured.
    """
    config = replace(config, skip_tokenizer_init=True, disable_radix_cache=True)
    if config.audit_rate is None:
        config = replace(config, audit_rate=0.0)
    longest = max(len(prompt) for prompts in session.prompts.values() for prompt in prompts)
    most = longest + session.workload.num_tokens + ROOM
    running = config.max_running_requests or session.batch_sizes[-1]
    return replace(
        config,
        max_running_requests=running,
        max_total_tokens=config.max_total_tokens or running * most,
        context_length=config.context_length or min(most, hub.resolve_model(config).context_length),
    )
