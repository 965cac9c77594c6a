"""Audits in the scheduler: their turns, their pages, and their end. Invariants are checked after every event."""

import random
from array import array

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready
from support.new_frontend import kill_frontend
from support.plans import is_audit
from support.scheduler_features import audits_of

from overlap_spec.features.audit import Audit, Audited, StopSpeculating
from overlap_spec.features.audit.scheduler import GRAMMAR_ENDED, MOST_STARTS, PAGES_NEEDED, SHARE, share_of
from overlap_spec.features.grammar import DropGrammar, GrammarFailed, GrammarReady, PrepareGrammar
from overlap_spec.messages import AuditRoom, FlushCache, Grammar, GrammarKind, Phase, Replayed, StepPlan, find

PROMPT = list(range(1, 11))


def make_bench(num_pages: int = 65, **options: object) -> Bench:
    ready = make_ready(num_pages=num_pages, extensions=(AuditRoom(9, 2, 4),))
    return Bench(ready, **options)


def audit(
    uid: int, prompt: list[int] = PROMPT, num_served: int = 5, control: bool = False, grammar: Grammar | None = None
) -> Audit:
    admit = make_admit(uid, prompt, num_served, grammar=grammar)
    return Audit(admit, array("i", range(num_served)).tobytes(), control)


def audited(bench: Bench) -> list[Audited]:
    """What the frontend was told of audits that have ended."""
    return [each for each in bench.to_frontend if isinstance(each, Audited)]


def padded_to(plan: StepPlan) -> int | None:
    """None: it is no step of audits."""
    found = find(plan.extensions, Replayed)
    return None if found is None else found.padded_to


def test_an_idle_engine_runs_audits_to_their_end() -> None:
    bench = make_bench()
    bench.deliver(audit(1))
    bench.deliver(audit(2, [7]))  # nothing to prefill
    bench.finish_all()
    drawn = {message.uid: array("i", message.drawn).tolist() for message in audited(bench)}
    assert drawn == {1: [0, 1, 2, 3, 4], 2: [0, 1, 2, 3, 4]}
    assert {padded_to(plan) for plan in bench.all_plans} == {0}
    bench.check_drained()


def test_where_layers_recur_chunks_have_the_whole_prompt_and_the_first_token_is_not_drawn() -> None:
    ready = make_ready(extensions=(AuditRoom(9, 2, 4),), state_chunk=8, chunk_tokens=11)
    bench = Bench(ready, deterministic=True)
    bench.deliver(audit(1, list(range(1, 21))))
    bench.deliver(audit(2, [7], num_served=1))  # nothing to compare
    bench.finish_all()
    assert [(each.start, len(each.tokens) // 4) for plan in bench.all_plans for each in plan.chunks] == [
        (0, 8),
        (8, 8),
        (16, 4),
    ]
    decodes = [find(plan.extensions, Replayed) for plan in bench.all_plans if plan.phase is Phase.DECODE]
    assert [each.positions for each in decodes if each] == [[20], [21], [22], [23]]
    drawn = {message.uid: (array("i", message.drawn).tolist(), message.first) for message in audited(bench)}
    assert drawn == {1: ([1, 2, 3, 4], 1), 2: ([], 1)}
    bench.check_drained()


@pytest.mark.parametrize(
    ("cut", "chunks"), [(0, [(0, 7)]), (3, [(0, 4), (4, 3)]), (6, [(0, 1), (1, 6)]), (7, [(0, 7)])]
)
def test_the_end_of_a_prompt_is_a_chunk_of_its_own_where_an_audit_asks_for_it(cut: int, chunks: list[object]) -> None:
    bench = make_bench()
    bench.deliver(replace(audit(1, PROMPT[:8]), cut=cut))
    bench.finish_all()
    assert [(each.start, len(each.tokens) // 4) for plan in bench.all_plans for each in plan.chunks] == chunks
    assert [array("i", message.drawn).tolist() for message in audited(bench)] == [[0, 1, 2, 3, 4]]
    bench.check_drained()


def test_controls_are_padded_and_take_turns_with_the_others() -> None:
    bench = make_bench()
    bench.deliver(audit(1))
    bench.deliver(audit(2, control=True))
    bench.finish_all()
    decodes = [plan for plan in bench.all_plans if plan.phase is Phase.DECODE]
    assert {len(plan.slots) for plan in decodes} == {1} and {padded_to(plan) for plan in decodes} == {0, 4}
    assert len(audited(bench)) == 2
    bench.check_drained()


def test_one_step_in_64_is_an_audits_while_requests_run() -> None:
    bench = make_bench()
    bench.admit(make_admit(1, [3, 4], max_new=200))
    bench.deliver(audit(2))
    for _ in range(2 * SHARE + 6):
        bench.run_device()
        bench.deliver_result()
        if 1 in bench.finishes:
            break
    kinds = [is_audit(plan) for plan in bench.all_plans[: bench.scheduler.planner._next_step_id]]
    gaps = [i for i, audits in enumerate(kinds) if audits and not all(kinds[i:])]
    assert all(later - earlier > SHARE for earlier, later in zip(gaps, gaps[1:], strict=False))
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


def test_a_request_takes_an_audits_pages_at_once() -> None:
    """The pool holds the request or the audit: the audit begins again, and is given up at last."""
    bench = make_bench(num_pages=15, prefix_cache=False)
    bench.deliver(audit(1, list(range(1, 31)), 10))
    for uid in range(2, 2 + MOST_STARTS):
        assert audits_of(bench.scheduler).running, "it has pages while no request wants them"
        bench.admit(make_admit(uid, list(range(1, 40)), max_new=4))
        assert not audits_of(bench.scheduler).running and bench.scheduler.queues.running
        while not bench.scheduler.queues.idle:
            bench.run_device()
            bench.deliver_result()
    bench.finish_all()
    assert [(message.drawn, message.dropped) for message in audited(bench)] == [(b"", PAGES_NEEDED)]
    bench.check_streams()
    bench.check_drained()


def test_the_cache_is_flushed_while_audits_run() -> None:
    bench = make_bench()
    bench.deliver(audit(1))
    bench.deliver(FlushCache())
    assert bench.flushed == [True] and bench.scheduler.inflight
    bench.finish_all()
    bench.check_drained()


@pytest.mark.parametrize(("rate", "share"), [(0.001, 64), (0.01, 64), (0.05, 13), (0.5, 1), (1.0, 1)])
def test_more_steps_are_audits_where_more_requests_are_audited(rate: float, share: int) -> None:
    assert share_of(rate) == share


def test_nothing_is_guessed_after_a_fault() -> None:
    bench = make_bench()
    bench.admit(make_admit(1, PROMPT, max_new=20))
    bench.deliver(StopSpeculating())
    bench.finish_all()
    widths = [plan.width for plan in bench.all_plans if plan.phase is Phase.DECODE]
    assert set(widths[2:]) == {1} and len(widths) > 10, "but for the steps in flight"
    bench.check_streams()


REGEX = Grammar(GrammarKind.REGEX, "[a-z]+")


def drawn_of(bench: Bench) -> list[int]:
    (message,) = audited(bench)
    return array("i", message.drawn).tolist()


def test_an_audit_with_a_grammar_waits_for_one_of_its_own() -> None:
    bench = make_bench()
    bench.deliver(audit(7, grammar=REGEX))
    assert bench.to_worker == [PrepareGrammar(-7, REGEX)] and not bench.all_plans
    bench.deliver(GrammarReady(-7))
    bench.finish_all()
    resets = [reset for plan in bench.all_plans for reset in plan.resets.values()]
    assert [(reset.uid, reset.sampling.grammar) for reset in resets] == [(-7, Grammar(GrammarKind.REGEX, ""))]
    assert drawn_of(bench) == [0, 1, 2, 3, 4] and bench.to_worker[1:] == [DropGrammar(-7)]
    bench.check_drained()


def test_an_audit_whose_grammar_does_not_compile_is_given_up() -> None:
    bench = make_bench()
    bench.deliver(audit(7, grammar=REGEX))
    bench.deliver(GrammarFailed(-7, "not today"))
    assert [(message.drawn, message.dropped) for message in audited(bench)] == [(b"", GRAMMAR_ENDED)]
    assert bench.to_worker[1:] == [DropGrammar(-7)]
    bench.check_drained()


def test_an_audit_ends_where_its_grammar_does() -> None:
    """The tokens before are compared; those of the step that could not follow it are not."""
    bench = make_bench()
    bench.deliver(audit(7, [9], grammar=REGEX))
    bench.deliver(GrammarReady(-7))
    for _ in range(2):
        bench.run_device()
        bench.deliver_result()
    bench.run_device()
    bench.deliver(GrammarFailed(-7, "no further"))
    bench.finish_all()
    assert drawn_of(bench) == [0, 1] and audited(bench)[0].dropped == GRAMMAR_ENDED
    assert len(audited(bench)[0].margins) == 8 * 2 and bench.to_worker[1:] == [DropGrammar(-7)]
    bench.check_drained()


def test_a_grammar_is_kept_while_a_step_in_flight_has_it() -> None:
    """The audit is given up while its step is in flight; that its grammar fails meanwhile is no matter."""
    bench = make_bench(num_pages=15, prefix_cache=False)
    bench.deliver(audit(1, list(range(1, 31)), 10, grammar=REGEX))
    bench.deliver(GrammarReady(-1))
    audits_of(bench.scheduler).running[0].num_starts = MOST_STARTS
    bench.admit(make_admit(2, list(range(1, 40)), max_new=4))
    bench.deliver(GrammarFailed(-1, "late"))
    assert [message.dropped for message in audited(bench)] == [PAGES_NEEDED]
    assert is_audit(bench.scheduler.inflight[0].plan) and len(bench.to_worker) == 1
    bench.run_device()
    bench.deliver_result()
    assert bench.to_worker[1:] == [DropGrammar(-1)]
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


def test_a_step_in_flight_does_not_count_once_the_pages_are_lost() -> None:
    """The audit begins again, and draws every token once."""
    bench = make_bench()
    bench.deliver(audit(1, [9]))
    for _ in range(3):
        bench.run_device()
        bench.deliver_result()
    audits = audits_of(bench.scheduler)
    assert len(audits.running[0].drawn) == 3 and bench.scheduler.inflight
    audits.give_back()
    bench.finish_all()
    assert drawn_of(bench) == [0, 1, 2, 3, 4] and audits.num_restarts == 1
    bench.check_drained()


@pytest.mark.parametrize("num_results", range(5))
def test_audits_of_a_dead_frontend_are_given_up_wherever_they_are(num_results: int) -> None:
    bench = make_bench()
    for uid in range(1, 5):
        bench.deliver(audit(uid, grammar=REGEX if uid == 3 else None))
    for _ in range(num_results):
        bench.run_device()
        bench.deliver_result()
    assert not audited(bench)
    kill_frontend(bench, random.Random(0))
    bench.finish_all()
    audits = audits_of(bench.scheduler)
    assert not (audited(bench) or audits.waiting or audits.running or audits.held)
    assert sorted(audits.free_slots) == [9, 10]
    assert [each.uid for each in bench.to_worker if isinstance(each, DropGrammar)] == [-3]
    bench.check_drained()
    bench.deliver(audit(11))
    bench.finish_all()
    assert [each.uid for each in audited(bench)] == [11]
