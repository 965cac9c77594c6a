"""Every parameter with every method, at depth 1 and 2: replies are plain decoding's (`support/parameter_cases.py`).

With `--matrix FILE` the outcome of each cell is written, from which docs/correctness.md has its table.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.fake_engine_client import FakeClient, ask
from support.parameter_cases import (
    ALIASES,
    CASES,
    CHAT,
    COLUMNS,
    COMPLETIONS,
    DEPTHS,
    OUTSIDE,
    PENDING,
    Case,
    comparable,
)
from support.ring import RingConfig, tiny_loaded
from support.ring_server import serving

from overlap_spec.messages import SamplingParams
from overlap_spec.server.native import GenerateRequest, NativeSampling
from overlap_spec.server.openai_requests import ChatRequest, CompletionRequest
from overlap_spec.server.unsupported import UNSUPPORTED
from overlap_spec.tokenizer.codec import TextCodec

MODELS_SEED = 10
PLAIN = RingConfig(grammars=True, num_steps=0, num_slots=1, depth=1, prefix_cache=False, max_len=200)
Replies = dict[str, list[Any]]  # by parameter, case by case, prompt by prompt
Note = Callable[[str, str, int, str], None]  # parameter, column, depth, what the cell says


async def replies_to(http: httpx.AsyncClient, cases: dict[str, tuple[Case, ...]], with_fields: bool = True) -> Replies:
    """All at once: the engine batches them as they come."""

    async def one(case: Case, body: dict[str, Any]) -> Any:
        reply = await http.post(case.endpoint, json=body)
        assert reply.status_code == 200, f"{body}: {reply.text}"
        return comparable(reply.json())

    async def all_of(of_parameter: tuple[Case, ...]) -> list[Any]:
        return await asyncio.gather(*(one(case, body) for case in of_parameter for body in case.bodies(with_fields)))

    return dict(zip(cases, await asyncio.gather(*map(all_of, cases.values())), strict=True))


def replies_of(codec: TextCodec, method: str, topk: int, config: RingConfig, with_fields: bool = True) -> Replies:
    """Of a ring with a method."""

    async def run() -> Replies:
        models = tiny_loaded(MODELS_SEED, config.num_steps, method=method, topk=topk)
        async with serving(models, config, codec) as http:
            return await replies_to(http, CASES, with_fields)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def plain(codec: TextCodec) -> Replies:
    """What every request gets alone, token by token."""
    return replies_of(codec, "EAGLE3", 1, PLAIN)


@pytest.mark.slow_but_every(13)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("column", COLUMNS)
def test_replies_are_plain_decodings(
    codec: TextCodec, plain: Replies, note_cell: Note, column: str, depth: int
) -> None:
    method, topk = COLUMNS[column]
    num_steps, method = (0, "EAGLE3") if method == "NONE" else (3, method)
    config = RingConfig(
        grammars=True,
        method=method,
        num_steps=num_steps,
        topk=topk,
        depth=depth,
        num_slots=8,
        num_pages=400,
        max_len=200,
    )
    found = replies_of(codec, method, topk, config)
    wrong = [name for name in CASES if found[name] != plain[name]]
    for name in CASES:
        note_cell(name, column, depth, "differs" if name in wrong else "equal")
    assert not wrong, {name: _difference(found[name], plain[name]) for name in wrong}


@pytest.mark.slow
def test_every_case_has_an_effect(codec: TextCodec, plain: Replies) -> None:
    """Of its values: without them the replies are others."""
    without = replies_of(codec, "EAGLE3", 1, PLAIN, with_fields=False)
    for name, cases in CASES.items():
        each = len(plain[name]) // len(cases)
        for i, case in enumerate(cases):
            part = slice(each * i, each * (i + 1))
            assert plain[name][part] != without[name][part], f"{name}: {case.fields} changes nothing"


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_what_has_no_row_of_its_own_is_refused_by_name(note_cell: Note, endpoint: str) -> None:
    """By the server, whatever the method."""
    body = {"prompt": "a"} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    for name in UNSUPPORTED:
        reply = ask(FakeClient(), "POST", endpoint, json={**body, name: {"asks": "something"}})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name, name
        for column in COLUMNS:
            for depth in DEPTHS:
                note_cell(name, column, depth, "400")


def test_every_parameter_has_a_row() -> None:
    """A new field of the APIs, or of the engine's own parameters, is a row, another name of one, or outside."""
    known = CASES.keys() | ALIASES.keys() | OUTSIDE.keys() | UNSUPPORTED.keys() | PENDING
    for shape in (SamplingParams, ChatRequest, CompletionRequest, GenerateRequest, NativeSampling):
        missing = set(shape.__struct_fields__) - known
        assert not missing, f"{shape.__name__}: add cases to tests/support/parameter_cases.py for {sorted(missing)}"
    assert not CASES.keys() & UNSUPPORTED.keys(), "a parameter is honoured, or it is refused"
    assert ALIASES.keys().isdisjoint(CASES) and set(ALIASES.values()) <= CASES.keys()


def _difference(found: list[Any], plain: list[Any]) -> str:
    first = next(pair for pair in zip(found, plain, strict=True) if pair[0] != pair[1])
    return "\n".join(json.dumps(reply) for reply in first)
