"""Requests with grammars at the scheduler: how many the worker is asked for ahead of their slots, and whose first."""

import random

import msgspec
from support.fake_device import Bench, make_admit, make_ready
from support.new_frontend import ask_again, kill_frontend

from overlap_spec.features.grammar import DropGrammar, GrammarFailed, GrammarReady, PrepareGrammar
from overlap_spec.features.grammar.scheduler import MOST_PREPARED
from overlap_spec.messages import Admit, Grammar, GrammarKind

REGEX = Grammar(GrammarKind.REGEX, "a+")
SLOTS = 8  # of the fake device


def bench_with(*clients: str) -> Bench:
    """A scheduler that has admitted a request with a grammar of each client named, numbered from 1 on."""
    bench = Bench(make_ready(), max_running=SLOTS)
    for uid, client in enumerate(clients, start=1):
        bench.admit(msgspec.structs.replace(make_admit(uid, [1, 2, 3], 4, grammar=REGEX), client=client))
    return bench


def grouped(uid: int, text: str) -> Admit:
    return make_admit(uid, [1, 2, 3], 4, grammar=Grammar(GrammarKind.REGEX, text))


def asked_for(bench: Bench) -> list[int]:
    return [each.uid for each in bench.to_worker if isinstance(each, PrepareGrammar)]


def test_many_grammars_reach_the_worker_a_few_at_a_time() -> None:
    count = 8 * MOST_PREPARED
    bench = bench_with(*["alice"] * count)
    assert asked_for(bench) == list(range(1, MOST_PREPARED + 1))
    assert len(bench.scheduler.queues.held) == count
    bench.deliver(GrammarReady(1))  # it gets a slot: its place is free with the next event
    bench.deliver(GrammarReady(2))
    assert asked_for(bench)[MOST_PREPARED:] == [MOST_PREPARED + 1]


def test_a_place_is_another_s_with_the_next_result() -> None:
    """The worker hears of it after the plan that the result is answered by."""
    bench = bench_with(*["alice"] * (MOST_PREPARED + 1))
    bench.deliver(GrammarReady(1))
    assert asked_for(bench)[MOST_PREPARED:] == []
    bench.run_device()
    bench.deliver_result()
    assert asked_for(bench)[MOST_PREPARED:] == [MOST_PREPARED + 1]


def test_all_are_answered_in_the_end() -> None:
    bench = bench_with(*["alice"] * (3 * MOST_PREPARED))
    ready = 0
    while len(bench.finishes) < 3 * MOST_PREPARED:
        for uid in asked_for(bench)[ready:]:
            ready += 1
            bench.deliver(GrammarReady(uid))
        bench.finish_all()
    dropped = [each.uid for each in bench.to_worker if isinstance(each, DropGrammar)]
    assert sorted(dropped) == asked_for(bench) == list(range(1, 3 * MOST_PREPARED + 1))
    assert not bench.scheduler.queues.held and not bench.scheduler.queues.open


def test_the_text_of_a_group_s_grammar_is_kept_once_and_leaves_once_for_each_request() -> None:
    bench = Bench(make_ready(), max_running=SLOTS)
    sent: list[PrepareGrammar] = []
    bench.worker.send = lambda message: sent.append(message)
    text = "a" * 5000
    for uid in (1, 2):
        bench.admit(msgspec.msgpack.decode(msgspec.msgpack.encode(grouped(uid, text)), type=Admit))
    assert [each.grammar.text for each in sent] == [text, text] and sent[0].grammar.text is sent[1].grammar.text
    left = [request.admit.sampling.grammar for request in bench.scheduler.queues.held.values()]
    assert left == [Grammar(GrammarKind.REGEX, "")] * 2, "slots need none of it"


def test_clients_take_turns() -> None:
    """Bob comes after hundreds of grammars of Alice, and is next."""
    bench = bench_with(*["alice"] * 300, "bob")
    for uid in asked_for(bench):
        bench.deliver(GrammarReady(uid))
    bench.finish_all()
    following = asked_for(bench)[MOST_PREPARED:]
    assert 301 in following[:2] and following[0] == MOST_PREPARED + 1


def test_what_ends_before_its_grammar_was_asked_for_is_not_dropped() -> None:
    bench = bench_with(*["alice"] * (MOST_PREPARED + 2))
    last, first = MOST_PREPARED + 2, 1
    bench.abort(last)
    assert not [each for each in bench.to_worker if isinstance(each, DropGrammar)]
    bench.abort(first)
    assert bench.to_worker[MOST_PREPARED:] == [DropGrammar(first), PrepareGrammar(MOST_PREPARED + 1, REGEX)]
    bench.deliver(GrammarReady(first))  # it was on its way
    assert set(bench.finishes) == {first, last} and last not in asked_for(bench)


def test_a_grammar_that_fails_makes_room() -> None:
    bench = bench_with(*["alice"] * (MOST_PREPARED + 1))
    bench.deliver(GrammarFailed(1, "no text satisfies it"))
    assert [(uid, each.field) for uid, each in bench.refused.items()] == [(1, "grammar")]
    assert bench.to_worker[MOST_PREPARED:] == [DropGrammar(1), PrepareGrammar(MOST_PREPARED + 1, REGEX)]


def test_grammars_of_dropped_requests_are_dropped_and_late_words_of_them_concern_no_other() -> None:
    bench = Bench(make_ready())
    for uid in (1, 2):
        bench.admit(make_admit(uid, [1, 2, 3], 20, grammar=REGEX))
    bench.deliver(GrammarReady(1))
    assert list(bench.scheduler.queues.held) == [2]
    again = kill_frontend(bench, random.Random(0))
    bench.finish_all()
    ask_again(bench, again)
    bench.deliver(GrammarReady(2))
    bench.deliver(GrammarFailed(1, "it can be followed no further"))
    new = [admit.uid for admit in again]
    assert list(bench.scheduler.queues.held) == new and not bench.refused
    assert asked_for(bench) == [1, 2, *new]
    assert sorted(each.uid for each in bench.to_worker if isinstance(each, DropGrammar)) == [1, 2]
    for uid in new:
        bench.deliver(GrammarReady(uid))
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()
