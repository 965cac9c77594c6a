"""The benchmark's step cases are well formed: they run, on a CPU, as reference against reference. Times need a GPU."""

import pytest
import torch
from kernel_cases.expert_cases import Mixture, expert_cases, layer_bytes
from kernel_cases.inputs import HeadShape
from kernel_cases.latent_cases import Work, latent_cases
from kernel_cases.shapes import Shape, assert_alike
from kernel_cases.step_cases import NUM_ROWS, Place, StepCase, slot_cases, step_cases
from kernel_cases.tree_cases import tree_cases, tree_slot_cases

TINY = Shape(hidden=32, intermediate=48, heads=HeadShape(4, 2, 16), vocabulary=64, draft_vocabulary=24)
PLACE = Place("cpu", rotated_bytes=10_000)
STEP_OPS = {"fused_linear", "linear_add", "linear_logits", "linear_argmax", "decode_attention", "draft_input"}
TREE_OPS = {"tree_attention", "add_children", "expand_tree", "top_tokens", "move_cache_rows"}
TREE_OPS |= {"gather_tree", "judge_tree", "select_tree", "marginal_tree", "place_tree"}
SLOT_OPS = {"gather_window", "judge_chain", "place_guesses"}


def all_cases() -> list[StepCase]:
    torch.manual_seed(0)
    trees = [*tree_cases("tiny", TINY, PLACE), *tree_slot_cases(PLACE)]
    return [*step_cases("tiny", TINY, PLACE), *slot_cases(PLACE), *trees]


@pytest.fixture(scope="module")
def cases() -> list[StepCase]:
    return all_cases()


def test_every_op_of_a_step_is_there_at_every_number_of_rows(cases: list[StepCase]) -> None:
    assert {case.op for case in cases} == STEP_OPS | SLOT_OPS | TREE_OPS | {"select_rows"}
    for case in cases:
        same = [other.num_rows for other in cases if (case.op, case.workload) == (other.op, other.workload)]
        assert tuple(same) == NUM_ROWS, case.op


@pytest.mark.slow
def test_cases_run_and_pass_their_checks(cases: list[StepCase]) -> None:
    for case in cases:
        case.check()
        for call in case.calls[:2]:
            call()
        assert case.num_bytes > 0, case.op
        case.check()  # a call that has written leaves its inputs as they have to be


@pytest.mark.slow
def test_latent_attention_of_every_format() -> None:
    works = (Work(2, 40), Work(1, 70, 4, "fp8_e4m3"))
    for case, keys in zip(latent_cases("DeepSeek-V2-Lite", works, PLACE), (80, 70), strict=True):
        case.check()
        rows = case.num_rows * 16 * 2 * 576
        assert case.num_bytes == keys * (1152 if keys == 80 else 576) + rows * 2, case.workload
        assert len({call.args[1].data_ptr() for call in case.calls}) == len(case.calls) > 1


def test_weights_together_are_as_large_as_is_asked(cases: list[StepCase]) -> None:
    maps = [case for case in cases if case.op in ("fused_linear", "linear_add")]
    assert all(len({call.args[1].matrix.data_ptr() for call in case.calls}) == len(case.calls) for case in maps)
    assert all(len(case.calls) * case.num_bytes > PLACE.rotated_bytes for case in maps)


def test_a_wrong_result_is_found() -> None:
    with pytest.raises(AssertionError):
        assert_alike((torch.ones(3), torch.tensor([1])), (torch.ones(3), torch.tensor([2])))
    with pytest.raises(AssertionError):
        assert_alike(torch.ones(3), torch.ones(3) + 0.1)


def test_experts_run_and_read_what_their_rows_have() -> None:
    sizes = Mixture(experts=6, top_k=2, hidden=64, inner=96)
    cases = list(expert_cases("tiny", sizes, Place("cpu", 100_000, (1, 9))))
    for case in cases:
        case.check()
        assert len(case.calls) * layer_bytes(sizes) > 100_000 and [call() is not None for call in case.calls]
    one, many = cases
    assert one.num_bytes == layer_bytes(sizes) * 2 // 6 < many.num_bytes <= layer_bytes(sizes)
