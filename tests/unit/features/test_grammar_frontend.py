"""A bad grammar is refused before the request is admitted; one that takes too much is killed, and delays no others."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import msgspec
import pytest
from support.small_tokenizers import SMOLLM2
from support.tiny.grammars import tag, tiny_grammar_vocabulary

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar.compiler import Checked, GrammarCompiler
from overlap_spec.features.grammar.frontend import GrammarChecks, GrammarHook, Verdict, Verdicts
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.frontend.hooks import Hooks, Preparing
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.messages import EngineLimits, Grammar, GrammarKind, Reasoning, SamplingParams, TextPrompt, Thinking
from overlap_spec.runtime.isolated import TooLong, WorkFailed

GOOD, BAD = Grammar(GrammarKind.REGEX, "[0-9]+"), Grammar(GrammarKind.REGEX, "(a")
VOCABULARY = GrammarVocabulary(str(SMOLLM2), 49152, (2,))
PATTERNS = {f"k{i}": {"type": "string", "pattern": f"^x{{{i}}}.*y$"} for i in range(600)}
SLOW = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"properties": PATTERNS}))  # 0.1 to 0.4 s of CPU time
LARGE = Grammar(GrammarKind.REGEX, "(a{990}){1000}b{1}")
OWNER = "key:a"


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarChecks]:
    checks = GrammarChecks(VOCABULARY)
    yield checks
    checks.close()


def sharing(process: GrammarChecks, quick_s: float = 5.0, slow_s: float = 5.0) -> GrammarChecks:
    """Checks that know nothing yet, done in a process that has been started."""
    checks = GrammarChecks(VOCABULARY, quick_s, slow_s)
    checks._isolated = process._isolated
    return checks


async def prepared(checks: GrammarChecks, grammar: Grammar | None) -> SamplingParams:
    """What the scheduler would be sent for a request of `OWNER`."""
    request = OpenRequest(1, 1, "r", OWNER)
    preparing = Preparing(request, TextPrompt(""), [5], EngineLimits(100, 100, 4, 49152))
    return await Hooks([GrammarHook(checks)]).prepared(SamplingParams(grammar=grammar), preparing)


def answered(checks: GrammarChecks, grammar: Grammar, owner: str = OWNER) -> str:
    """Why a grammar is refused."""

    async def check() -> str:
        try:
            await checks.checked(grammar, owner)
        except RequestError as error:
            assert error.field == "grammar"
            return str(error)
        return ""

    return asyncio.run(check())


def test_bad_ones_are_refused(process: GrammarChecks) -> None:
    async def check() -> None:
        for grammar in (None, GOOD):
            assert (await prepared(process, grammar)).grammar is grammar
        with pytest.raises(RequestError, match="unclosed group"):
            await prepared(process, BAD)

    asyncio.run(check())


def test_only_a_request_with_a_grammar_is_answered_beside_others(process: GrammarChecks) -> None:
    hooks = Hooks([GrammarHook(process)])
    assert [hooks.take_long(SamplingParams(grammar=grammar)) for grammar in (None, GOOD)] == [False, True]


def test_without_end_token_nothing_is_started() -> None:
    checks = GrammarChecks(GrammarVocabulary(str(SMOLLM2), 100, ()))
    checks.prepare()
    assert "no end token" in answered(checks, GOOD) and checks._isolated.pid is None


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    tokenizer = json.loads((SMOLLM2 / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": {"type": "BPE", "vocab": {}}}))
    checks = GrammarChecks(GrammarVocabulary(str(tmp_path), 49152, (2,)))
    try:
        assert answered(checks, GOOD).startswith("grammar: ")
    finally:
        checks.close()


def test_what_takes_too_much_is_refused_with_the_limit(process: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert answered(process, LARGE) == "grammar took more than 64 MiB to compile: make it smaller"
        monkeypatch.setattr(process._isolated, "run", None)  # the second time it is known
    monkeypatch.undo()
    hasty = sharing(process, quick_s=0.01, slow_s=0.02)
    assert answered(hasty, SLOW) == "grammar took more than 0.02 s to compile: make it smaller"


def test_what_has_been_answered_starts_no_process_again(
    process: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = sharing(process)
    first = [answered(checks, grammar) for grammar in (GOOD, BAD)]
    monkeypatch.setattr(checks._isolated, "run", None)
    assert [answered(checks, grammar) for grammar in (GOOD, BAD)] == first and first[0] == ""
    monkeypatch.undo()
    thinking = [Grammar(GOOD.kind, GOOD.text, thinking=Thinking(budget, False, (1,), (2,))) for budget in (4, 5)]
    assert answered(checks, thinking[0]) == ""
    monkeypatch.setattr(checks._isolated, "run", None)
    assert answered(checks, thinking[1]) == ""


def test_the_worker_is_told_what_takes_long(process: GrammarChecks) -> None:
    checks = sharing(process, quick_s=0.02)

    async def check() -> None:
        for _ in range(2):
            for grammar, is_slow in ((GOOD, False), (SLOW, True)):
                claimed = Grammar(grammar.kind, grammar.text, is_slow=not is_slow)  # a client's word is not taken
                assert (await prepared(checks, claimed)).grammar == Grammar(grammar.kind, grammar.text, is_slow=is_slow)

    asyncio.run(check())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        (GrammarKind.EBNF, 'root ::= "a" | "b" root', "bba"),
        (GrammarKind.CHOICE, '["yes", "né"]', "né"),
        (GrammarKind.STRUCTURAL_TAG, tag(), 'well <f=a>{"a": 1}</f> done'),
    ],
    ids=["ebnf", "choice", "tag"],
)
def test_the_worker_gets_rules_that_it_need_not_make_again(
    process: GrammarChecks, kind: GrammarKind, text: str, output: str
) -> None:
    for reasoning in (None, Reasoning("<think>", "</think>")):
        checked = asyncio.run(sharing(process).checked(Grammar(kind, text, reasoning=reasoning), OWNER))
        assert checked.kind is GrammarKind.LARK and checked.text != text and checked.reasoning == reasoning
        matcher = GrammarCompiler(VOCABULARY).compile(checked)
        tokens = VOCABULARY.tokenizer().tokenize_str(output)
        assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_rules_are_bounded_as_grammars_are(process: GrammarChecks) -> None:
    text = msgspec.json.encode([f"{'x' * 80}{index}" for index in range(3_000)]).decode()
    assert "as rules in Lark it has 265894 bytes" in answered(sharing(process), Grammar(GrammarKind.CHOICE, text))


class FakeProcess:
    """Jobs that end when a test says so. `texts`: of those that have begun, with the limit of each."""

    def __init__(self, quick_s: float) -> None:
        self.quick_s = quick_s
        self.begun: list[tuple[str, float]] = []
        self.killed: list[str] = []
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def run(self, payload: bytes, timeout_s: float) -> bytes:
        text = msgspec.msgpack.decode(payload, type=Grammar).text
        self.begun.append((text, timeout_s))
        try:
            if "long" in text:
                if timeout_s == self.quick_s:
                    raise TooLong("")
                await self.go_on.wait()
        except asyncio.CancelledError:
            self.killed.append(text)
            raise
        if self.error is not None:
            raise self.error
        return msgspec.msgpack.encode(Checked())


def with_fake(test: Callable[[GrammarChecks, FakeProcess], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        checks = GrammarChecks(VOCABULARY)
        fake = FakeProcess(checks._quick_s)
        checks._isolated = fake
        await asyncio.wait_for(test(checks, fake), 10.0)

    asyncio.run(run())


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def test_long_ones_take_turns_and_delay_no_short_ones() -> None:
    async def inner(checks: GrammarChecks, fake: FakeProcess) -> None:
        long = [asyncio.create_task(checks.checked(regex(f"long {i}"), "attacker")) for i in range(20)]
        await settled()
        await checks.checked(regex("short"), "victim")  # while a long one runs
        own = asyncio.create_task(checks.checked(regex("long, the victim's"), "victim"))
        await settled()
        fake.go_on.set()
        assert (await own).is_slow
        order = [text for text, limit in fake.begun if limit != fake.quick_s]
        assert order.index("long, the victim's") <= 2, "one ran, and one waited for longer"
        await asyncio.gather(*long)

    with_fake(inner)


def test_requests_with_the_same_grammar_wait_for_one_check() -> None:
    async def inner(checks: GrammarChecks, fake: FakeProcess) -> None:
        tasks = [asyncio.create_task(checks.checked(regex("long"), OWNER)) for _ in range(5)]
        await settled()
        assert len(fake.begun) == 2  # up to the short limit, and up to the long one
        tasks[0].cancel()
        await settled()
        assert not fake.killed, "others wait for it"
        fake.go_on.set()
        assert all(result.is_slow for result in await asyncio.gather(*tasks[1:]))
        assert not checks._running

    with_fake(inner)


def test_a_check_that_no_request_waits_for_is_killed() -> None:
    async def inner(checks: GrammarChecks, fake: FakeProcess) -> None:
        tasks = [asyncio.create_task(checks.checked(regex("long"), OWNER)) for _ in range(2)]
        await settled()
        for task in tasks:
            task.cancel()
        await settled()
        assert fake.killed == ["long"] and not checks._running
        again = asyncio.create_task(checks.checked(regex("long"), OWNER))
        await settled()
        fake.go_on.set()
        assert (await again).is_slow, "it is asked again, in a turn that was given back"

    with_fake(inner)


def test_a_process_that_fails_otherwise_says_nothing_of_the_grammar() -> None:
    async def inner(checks: GrammarChecks, fake: FakeProcess) -> None:
        fake.error = WorkFailed("its process ended without an answer")
        with pytest.raises(RequestError, match="could not be compiled: its process ended"):
            await checks.checked(regex("a"), OWNER)
        fake.error = None
        assert await checks.checked(regex("a"), OWNER) == regex("a")

    with_fake(inner)


def test_kept_verdicts_are_bounded_by_bytes() -> None:
    verdicts = Verdicts(10_000)
    for index in range(100):
        verdicts.put(regex(f"{index:04}" * 100), Verdict("x" * 88))  # 1,000 bytes each
        assert verdicts.get(regex("0000" * 100)) is not None, "it has just been used"
    assert len(verdicts._kept) == 10 and verdicts._num_bytes == 10_000
    verdicts.put(regex("y" * 20_000), Verdict(""))
    assert not verdicts._kept and not verdicts._num_bytes


@pytest.mark.usefixtures("no_collections")
def test_a_check_holds_up_the_loop_no_longer_than_a_moment(process: GrammarChecks) -> None:
    async def inner() -> float:
        checks, longest, before = sharing(process), 0.0, time.thread_time()
        checking = asyncio.create_task(checks.checked(LARGE, OWNER))
        while not checking.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
            await asyncio.sleep(0.002)
            before = time.thread_time()
        with pytest.raises(RequestError):
            checking.result()
        return longest

    assert asyncio.run(inner()) < 0.02


def test_the_process_ends_when_it_is_closed() -> None:
    checks = GrammarChecks(tiny_grammar_vocabulary(128))
    checks.prepare()
    pid = checks._isolated.pid
    assert pid is not None and Path(f"/proc/{pid}").exists()
    GrammarHook(checks).close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
