"""Every parameter with every method, at depth 1 and 2: replies are plain decoding's (`support/parameter_cases.py`).

With `--matrix FILE` the outcome of each cell is written, from which docs/correctness.md has its table.
"""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from documents.age import changed_parts
from documents.result_tables import matrix_row
from support.fake_engine_client import INFO, FakeClient, ask
from support.matrix_columns import COLUMNS, DEPTHS
from support.parameter_cases import (
    ALIASES,
    CASES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    OUTSIDE,
    REFUSED,
    Case,
    comparable,
    reported,
    with_prompt,
)
from support.random_schedules import load
from support.ranked_models import ranked_models
from support.ring import RingConfig
from support.ring_server import serving
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.entrypoints.anthropic.requests import MessagesRequest
from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED
from overlap_spec.entrypoints.native.generate import GenerateRequest, NativeSampling
from overlap_spec.entrypoints.openai.requests import ChatRequest, CompletionRequest
from overlap_spec.entrypoints.parsers.formats import call_format, reasoning_format
from overlap_spec.entrypoints.responses.requests import ResponsesRequest
from overlap_spec.frontend.codec import TextCodec, load_codec
from overlap_spec.messages import SamplingParams
from overlap_spec.runtime.source import describe_source

MODELS_SEED = 10
RESULTS, MATRIX = Path(__file__).parent.parent.parent / "benchmarks/results", "parameter_matrix.json"
PLAIN = RingConfig(grammars=True, num_steps=0, num_slots=1, depth=1, prefix_cache=False, max_len=200)
SHAPES = (ChatRequest, CompletionRequest, GenerateRequest, NativeSampling, MessagesRequest, ResponsesRequest)
READS_ALL = msgspec.structs.replace(
    INFO, call_format=call_format("pythonic", ""), reasoning_format=reasoning_format("qwen3", "")
)
SAMPLE = "EAGLE3", 2  # whose cells other tiers compare with one prompt each
CELLS = [*product(COLUMNS, DEPTHS)]
OWN_LAYER = "NEXTN in DeepSeek's layout"  # no column: of a target that is published with such a layer
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", OWN_LAYER)
OTHER_TARGETS = [*product(["qwen3 moe"], COLUMNS, DEPTHS), *product(["glm 4.5"], [OWN_LAYER], DEPTHS)]
OTHER_TARGETS += [("qwen3 next", column, DEPTHS[index % 2]) for index, column in enumerate(CHAINS)]
Cases = dict[str, tuple[Case, ...]]
Replies = dict[str, list[Any]]  # by parameter, case by case, prompt by prompt
Note = Callable[[str, str, int, str], None]  # parameter, column, depth, what the cell says


async def replies_to(
    http: httpx.AsyncClient, cases: Cases, with_fields: bool = True, most_prompts: int | None = None
) -> Replies:
    """All at once: the engine batches them as they come."""

    async def one(case: Case, body: dict[str, Any]) -> Any:
        reply = await http.post(case.endpoint, json=body)
        assert reply.status_code == 200, f"{body}: {reply.text}"
        return reply.json()

    async def all_of(of_parameter: tuple[Case, ...]) -> list[Any]:
        bodies = ((case, islice(case.bodies(with_fields), most_prompts)) for case in of_parameter)
        return await asyncio.gather(*(one(case, body) for case, of_case in bodies for body in of_case))

    return dict(zip(cases, await asyncio.gather(*map(all_of, cases.values())), strict=True))


def replies_of(codec: TextCodec, config: RingConfig, cases: Cases = CASES, **asked: Any) -> Replies:
    """Of a server with a method, whose format of calls and of reasoning is known."""

    async def run() -> Replies:
        models = ranked_models(config.ranks, lambda rank: load(MODELS_SEED, config, rank))
        async with serving(models, config, codec, READS_ALL) as http:
            return await replies_to(http, cases, **asked)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Of a tokenizer with special tokens that show."""
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("special"), minds_special=True))


def config_of(column: str, depth: int) -> RingConfig:
    """A ring of several slots. `column`: one of the matrix, or a method."""
    method, topk = COLUMNS.get(column, (column, 1))
    num_steps, method = (0, "EAGLE3") if method == "NONE" else (3, method)
    shape = {"num_slots": 8, "num_pages": 400, "max_len": 200}
    return RingConfig(grammars=True, method=method, num_steps=num_steps, topk=topk, depth=depth, **shape)


def differing(found: Replies, plain: Replies) -> dict[str, str]:
    """By parameter, the first reply that differs."""
    return {name: _difference(found[name], plain[name]) for name in found if found[name] != plain[name]}


@pytest.fixture(scope="module")
def plain(codec: TextCodec) -> Replies:
    """What every request gets alone, token by token."""
    return comparable(replies_of(codec, PLAIN))


@pytest.mark.full
@pytest.mark.parametrize(("column", "depth"), CELLS)
def test_replies_are_plain_decodings(
    codec: TextCodec, plain: Replies, note_cell: Note, column: str, depth: int
) -> None:
    found = comparable(replies_of(codec, config_of(column, depth)))
    wrong = differing(found, plain)
    for name in CASES:
        note_cell(name, column, depth, "differs" if name in wrong else "equal")
    assert not wrong, wrong


@functools.cache
def plain_of(family: str, codec: TextCodec) -> Replies:
    """`plain`, of another target."""
    return comparable(replies_of(codec, replace(PLAIN, family=family)))


@pytest.mark.full
@pytest.mark.parametrize(("family", "column", "depth"), OTHER_TARGETS)
def test_replies_of_other_targets_are_plain_decodings(codec: TextCodec, family: str, column: str, depth: int) -> None:
    """Of a mixture with every method, of one with a layer of its own, and of one whose layers recur with chains."""
    config = replace(config_of(column, depth), family=family)
    assert not (wrong := differing(comparable(replies_of(codec, config)), plain_of(family, codec))), wrong


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "depth"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("column", COLUMNS)
def test_replies_of_ranks_are_plain_decodings_of_the_whole_model(
    codec: TextCodec, plain: Replies, column: str, ranks: int, depth: int
) -> None:
    found = comparable(replies_of(codec, replace(config_of(column, depth), ranks=ranks)))
    assert not (wrong := differing(found, plain)), wrong


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"ranks": 2}, {"family": "qwen3 moe"}], ids=["ranks", "mixture"])
def test_a_case_of_every_parameter_is_plain_decodings_of_the_whole_model(
    codec: TextCodec, changes: dict[str, Any]
) -> None:
    """Over ranks, and of a mixture. The last case, where the tests below take the first."""
    cases = {name: of[-1:] for name, of in CASES.items()}
    assert_a_prompt_of_each_is_plain_decodings(codec, cases, **changes)


def assert_a_prompt_of_each_is_plain_decodings(codec: TextCodec, cases: Cases, **changes: Any) -> None:
    sample = replace(config_of(*SAMPLE), **changes)
    both = (
        replies_of(codec, config, cases, most_prompts=1) for config in (sample, replace(PLAIN, family=sample.family))
    )
    found, plain = map(comparable, both)
    assert found.keys() == cases.keys() and not (wrong := differing(found, plain)), wrong


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_the_first_case_of_every_second_parameter_is_plain_decodings(codec: TextCodec, first: int) -> None:
    names = [*CASES][first::2]
    assert_a_prompt_of_each_is_plain_decodings(codec, {name: CASES[name][:1] for name in names})


@pytest.mark.full  # the tests above have the first and the last case of each parameter
def test_a_sixth_of_the_other_cases_is_plain_decodings(codec: TextCodec) -> None:
    assert_a_prompt_of_each_is_plain_decodings(codec, {name: of[1::6] for name, of in CASES.items()})


@pytest.mark.full
def test_every_case_has_an_effect(codec: TextCodec, plain: Replies) -> None:
    """Of its values: without them the replies are others."""
    without = comparable(replies_of(codec, PLAIN, with_fields=False))
    idle = [
        (name, case.endpoint, case.fields)
        for name, case, changed in _by_case(CASES, plain, without)
        if not (changed or case.is_reported)
    ]
    assert not idle, "they change nothing"


@pytest.mark.slow
def test_what_is_said_of_speculation_has_an_effect(codec: TextCodec) -> None:
    """It is in what replies report of their steps. The tokens are compared in every column."""
    cases = {name: part for name, of in CASES.items() if (part := tuple(case for case in of if case.is_reported))}
    config = RingConfig(num_slots=8, num_pages=400, max_len=200)
    asked, silent = (
        reported(replies_of(codec, config, cases, with_fields=with_fields)) for with_fields in (True, False)
    )
    assert cases
    for name, case, changed in _by_case(cases, asked, silent):
        assert changed, f"{name}: {case.fields} changes nothing"


def test_what_is_not_built_is_refused_by_name(note_cell: Note) -> None:
    """By the server, whatever the method."""
    asked = {name: {name: {"asks": "something"}} for name in UNSUPPORTED}
    for name, fields in asked.items():
        for endpoint in (COMPLETIONS, CHAT, GENERATE):
            _check_refusal(name, endpoint, fields)
        _note_refusal(note_cell, name)


@pytest.mark.parametrize("row", REFUSED)
def test_a_value_that_means_nothing_here_is_refused_by_name(note_cell: Note, row: str) -> None:
    endpoint, fields = REFUSED[row]
    _check_refusal(row.split()[0], endpoint, fields)
    _note_refusal(note_cell, row)


def test_every_parameter_has_a_row() -> None:
    """A new field of the APIs, or of the engine's own parameters, is a row, another name of one, or outside."""
    known = CASES.keys() | ALIASES.keys() | OUTSIDE.keys() | UNSUPPORTED.keys()
    for shape in (SamplingParams, *SHAPES):
        missing = set(shape.__struct_fields__) - known
        assert not missing, f"{shape.__name__}: add cases to tests/support/parameter_cases.py for {sorted(missing)}"
    assert not CASES.keys() & UNSUPPORTED.keys(), "a parameter is honoured, or it is refused"
    assert not (CASES.keys() | UNSUPPORTED.keys()) & REFUSED.keys()
    assert ALIASES.keys().isdisjoint(CASES) and set(ALIASES.values()) <= CASES.keys()


@pytest.mark.slow
def test_the_matrix_has_every_cell() -> None:
    """The one that documents show, unless it is named as older than the code."""
    matrix = json.loads((RESULTS / MATRIX).read_text())
    outcomes = {
        (name, column, depth): row.get(column, {}).get(str(depth), "empty")
        for name in (*CASES, *UNSUPPORTED, *REFUSED)
        for row in [matrix_row(matrix["cells"].get(name, {}), COLUMNS, DEPTHS)]
        for column in COLUMNS
        for depth in DEPTHS
    }
    rows = {name for name, _, _ in outcomes}
    if not changed_parts(matrix, describe_source()):
        assert matrix["cells"].keys() == rows
        assert not {cell: outcome for cell, outcome in outcomes.items() if outcome not in ("equal", "400")}


def _by_case(cases: Cases, some: Replies, others: Replies) -> Iterator[tuple[str, Case, bool]]:
    """For each case its parameter, and whether its replies differ."""
    for name, of in cases.items():
        each = len(some[name]) // len(of)
        for start, case in zip(range(0, len(some[name]), each), of, strict=True):
            part = slice(start, start + each)
            yield name, case, some[name][part] != others[name][part]


def _check_refusal(field: str, endpoint: str, fields: dict[str, Any]) -> None:
    body = {"text": "a", **fields} if endpoint == GENERATE else with_prompt(endpoint, "a", fields)
    reply = ask(FakeClient(), "POST", endpoint, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field, (field, endpoint, reply.text)


def _note_refusal(note_cell: Note, row: str) -> None:
    for column in COLUMNS:
        for depth in DEPTHS:
            note_cell(row, column, depth, "400")


def _difference(found: list[Any], plain: list[Any]) -> str:
    first = next(pair for pair in zip(found, plain, strict=True) if pair[0] != pair[1])
    return "\n".join(json.dumps(reply) for reply in first)
