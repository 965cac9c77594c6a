"""What grammars take in the worker is bounded by bytes: idle ones are forgotten, and one that grows too large fails."""

import random

import pytest
from support.small_tokenizers import SMOLLM2
from support.tiny.grammars import tiny_grammar_vocabulary

from overlap_spec.features.grammar import DropGrammar, GrammarFailed, PrepareGrammar
from overlap_spec.features.grammar.grammars import (
    GROWN_S,
    LOOK_S,
    MOST_EACH,
    MOST_IDLE,
    MOST_KEPT_S,
    GrammarMemory,
    Grammars,
    Judgement,
    RequestGrammar,
)
from overlap_spec.features.grammar.slow_grammars import SlowGrammars
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.features.grammar.window_masks import HostWindow
from overlap_spec.messages import Grammar, GrammarKind
from overlap_spec.runtime.heap import give_memory_back, heap_bytes

REGEX = Grammar(GrammarKind.REGEX, "[ab]+c")
VOCABULARY = tiny_grammar_vocabulary(128)


class Heap:
    """A heap of a size that a test says."""

    def __init__(self) -> None:
        self.size = 1 << 30

    def __call__(self) -> int:
        return self.size


def judged(memory: GrammarMemory, num_open: int = 0) -> Judgement:
    memory.spend(LOOK_S)
    assert memory.is_due
    judgement = memory.judge(num_open)
    assert not memory.is_due
    return judgement


def test_the_heap_is_compared_with_that_before_the_first_grammar() -> None:
    heap = Heap()
    memory = GrammarMemory(heap)
    memory.begin()
    heap.size += MOST_IDLE + 3 * MOST_EACH
    memory.begin()  # a second one does not count as none
    assert judged(memory, 3) is Judgement.FITS
    assert [judged(memory, 2) for _ in range(4)] == [Judgement.FORGET, Judgement.FAIL] * 2
    assert judged(memory, 2) is Judgement.FORGET and judged(memory, 3) is Judgement.FITS
    assert judged(memory, 2) is Judgement.FORGET, "it fits in between, so another is not failed at once"
    memory.accept()
    assert judged(memory, 0) is Judgement.FITS


def test_it_is_looked_at_when_grammars_have_taken_time() -> None:
    memory = GrammarMemory(Heap())
    memory.begin()
    memory.spend(LOOK_S / 2)
    assert not memory.is_due
    memory.spend(LOOK_S / 2)
    assert memory.is_due


def prepared(grammars: Grammars, *uids: int, grammar: Grammar = REGEX) -> list[RequestGrammar]:
    for uid in uids:
        grammars.prepare(PrepareGrammar(uid, grammar))
    found = [grammars.of(uid) for uid in uids]
    assert {reply.uid for reply in grammars.replies()} == set(uids)
    return found


@pytest.fixture
def heap() -> Heap:
    return Heap()


@pytest.fixture
def grammars(heap: Heap) -> Grammars:
    made = Grammars(VOCABULARY)
    made.memory = GrammarMemory(heap)
    return made


def look(grammars: Grammars) -> list[GrammarFailed]:
    grammars.memory.spend(LOOK_S)
    found = grammars.bound_memory()
    grammars._compile_threads[True].submit(lambda: None).result()
    return found


def test_idle_grammars_are_forgotten_first_and_then_the_largest_fails(grammars: Grammars, heap: Heap) -> None:
    first, second, _ = prepared(grammars, 1, 2, 3)
    grammars.drop(DropGrammar(3), False)
    assert look(grammars) == [] and grammars._compiler._compiled
    heap.size += MOST_IDLE + 2 * MOST_EACH + 1
    second.seconds = 2 * GROWN_S
    first.seconds = GROWN_S
    assert look(grammars) == [] and not grammars._compiler._compiled
    (failed,) = look(grammars)
    assert failed.uid == 2 and "takes too much memory" in failed.error
    assert second.failure and not first.failure
    grammars.drop(DropGrammar(2), False)
    heap.size -= MOST_IDLE
    assert look(grammars) == [] and not first.failure
    grammars.close()


def test_growth_that_no_grammar_had_time_for_is_another_matter(grammars: Grammars, heap: Heap) -> None:
    (grammar,) = prepared(grammars, 1)
    grammar.seconds = GROWN_S / 2
    heap.size += 1 << 30
    assert [look(grammars) for _ in range(5)] == [[]] * 5 and not grammar.failure
    grammars.close()


def test_a_matcher_that_has_taken_long_is_not_kept(grammars: Grammars) -> None:
    quick, slow = prepared(grammars, 1, 2)
    slow.seconds = MOST_KEPT_S + 0.1
    grammars.drop(DropGrammar(2), False)
    assert not grammars._compiler._compiled[REGEX].free
    grammars.drop(DropGrammar(1), False)
    assert grammars._compiler._compiled[REGEX].free == [quick.matcher]
    grammars.close()


def test_time_is_noted_wherever_a_grammar_is_followed(grammars: Grammars) -> None:
    slow = SlowGrammars(grammars)
    first, second = prepared(grammars, 1, 2)
    assert first.seconds > 0, "of its compilation"
    first.seconds = second.seconds = 0.0
    slow.note_time([first, second], 0.5)
    assert (first.seconds, second.seconds) == (0.25, 0.25) and grammars.memory.is_due
    slow.advance(1, [])
    slow._tasks[1].result()
    assert first.seconds > 0.25
    grammars.close()


@pytest.mark.slow
def test_a_lexer_that_grows_gives_its_memory_back_when_it_fails() -> None:
    grammars = Grammars(GrammarVocabulary(str(SMOLLM2), 49152, (2,)))
    words = grammars.vocabulary.tokenizer()
    slow, rng, before, failed = SlowGrammars(grammars), random.Random(0), heap_bytes(), list[GrammarFailed]()
    (grammar,) = prepared(grammars, 1, grammar=Grammar(GrammarKind.REGEX, r"(.|\n)*a(.|\n){120}b"))
    tokens = [token for token in range(300, 5000) if words.decode_bytes([token]).isascii()]
    for _ in range(2000):
        slow.advance(1, [rng.choice(tokens)])
        slow.fill(1, HostWindow([-1]))
        slow._tasks[1].result()
        if failed := grammars.bound_memory():
            break
    assert failed, grammar.failure
    assert heap_bytes() - before < 160 << 20
    grammars.drop(DropGrammar(1), False)
    slow.forget(1)
    del grammar
    give_memory_back()
    assert heap_bytes() - before < 16 << 20
    grammars.close()
