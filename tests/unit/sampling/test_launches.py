"""How many kernels a step launches beside its layers: what requests ask for costs a few of them."""

import pytest
from support.drawing_steps import DrawingStep
from support.launches import table

from overlap_spec.sampling.context import SAMPLING_WORK, SamplingWork

CHAIN, TREE = (4, False), (8, True)
PROCESSED = [work for work in SAMPLING_WORK if work.processed]
# Judge part, draws of a draft. Steps without parameters launch nothing for them.
WITHOUT = {
    SamplingWork(False, False, False): {CHAIN: (2, 6), TREE: (2, 10)},
    SamplingWork(True, False, False): {CHAIN: (5, 13), TREE: (5, 17)},
    SamplingWork(True, True, False): {CHAIN: (21, 25), TREE: (25, 47)},  # they draw again, for few rows
}
# Counts of tokens (2), guesses before the rows, positions, one pass over the logits, masks of grammars.
APPLIED = 6
IN_DRAFT = {CHAIN: 7, TREE: 7}  # counts (2), and of each of three levels the pass and the guesses before its rows


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("work", WITHOUT, ids=str)
def test_steps_without_parameters_launch_what_they_did(work: SamplingWork, shape: tuple[int, bool]) -> None:
    step = DrawingStep(work, *shape)
    parts = {"judge": step.judge(), "draft": step.draft()}
    assert tuple(found.total() for found in parts.values()) == WITHOUT[work][shape], table(parts)
    assert step.apply().total() == 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("work", PROCESSED, ids=str)
def test_parameters_cost_a_few_launches(work: SamplingWork, shape: tuple[int, bool]) -> None:
    """Beside what the kind costs without them; positions are computed for drawing as well."""
    step, plain = DrawingStep(work, *shape), WITHOUT[SamplingWork(True, work.filtered, False)][shape]
    parts = {"apply": step.apply(), "judge": step.judge(), "draft": step.draft()}
    log_probs = {CHAIN: 3, TREE: 6}[shape] if work.outputs else 0
    assert parts["apply"].total() <= APPLIED, table(parts)
    assert parts["judge"].total() <= plain[0] + APPLIED - 1 + log_probs, table(parts)
    assert parts["draft"].total() <= plain[1] + IN_DRAFT[shape], table(parts)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_grammar_costs_the_logits_and_a_pass(sampled: bool, shape: tuple[int, bool]) -> None:
    """And where it is greedy, three small ones that check the largest logit. Its draft is that of others."""
    step = DrawingStep(SamplingWork(sampled, False, False, of_target=True), *shape)
    judge, draft = WITHOUT[SamplingWork(sampled, False, False)][shape]
    parts = {"apply": step.apply(), "judge": step.judge()}
    assert parts["apply"].total() == 1 and parts["judge"].total() <= judge + (1 if sampled else 5), table(parts)
    assert DrawingStep(SamplingWork(sampled, False, False), *shape).draft().total() == draft
