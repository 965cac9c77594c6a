"""What benchmarks/prefill_profile.py runs, and how it sorts kernels."""

import prefill_profile
from prefill_profile import CASES, groups, plans


def test_plans_cover_a_prompt_without_gaps() -> None:
    case = next(case for case in CASES if "98,304" in case.name)
    steps = plans(case, width=4)
    work = [step.chunks[0] for step in steps]
    ends = [item.start + len(item.tokens) // 4 for item in work]
    assert [item.start for item in work] == [0, *ends[:-1]] and ends[-1] == case.num_tokens
    assert [item.next_token == -1 for item in work] == [False] * (len(work) - 1) + [True]
    assert [list(step.resets) for step in steps] == [[0]] + [[]] * (len(work) - 1)


def test_slots_share_no_page_and_pages_cover_prompt_and_window() -> None:
    for case in CASES:
        pages = [own for step in plans(case, width=4) for own in step.new_pages.values()]
        assert len(set().union(*pages)) == sum(map(len, pages))
        longest = max(start + rows for step in case.chunks for _, start, rows, _ in step)
        assert all(len(own) * prefill_profile.PAGE >= longest + 4 for own in pages)


def test_kernels_are_sorted_by_what_they_do() -> None:
    names = (
        "wide_linear",
        "nvjet_sm90_tst_64x64",
        "_paged_attention_kernel",
        "_combine_kernel",
        "_rope_kv_write_kernel",
    )
    assert groups({"name": name, "us": 2.0} for name in names) == {"attention": 4.0, "products": 4.0, "rest": 2.0}
