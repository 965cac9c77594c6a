"""The benchmark of step widths: what is compared differs in width alone."""

import time
from pathlib import Path

import pytest
import width_policy
from width_policy import ADAPTIVE, FIXED, PLAIN_KEY, TARGETS, Engines, Load, Run, bounds_of, known_cases, rows_of

from overlap_spec.config.resolve.numbers import DEEP_SPEC, FIELDS
from overlap_spec.config.speculation import METHOD_FACTS


def test_the_cases_have_loads_of_every_batch_size() -> None:
    cases = known_cases(Path("heads"))
    loads = [(name, load.prompts, load.batch) for name, case in cases.items() for load in TARGETS[case.target].loads]
    assert len(loads) == len(set(loads)) == 60
    assert {batch for _, _, batch in loads} == {1, 8, 32, 64, 128, 256}
    assert "standalone" not in known_cases(None)


def test_fixed_engines_have_the_numbers_that_are_the_default() -> None:
    cases = known_cases(Path("heads"))
    assert tuple(cases["tree"].numbers[name] for name in FIELDS) == DEEP_SPEC
    assert tuple(cases["standalone"].numbers[name] for name in FIELDS) == METHOD_FACTS["STANDALONE"].numbers
    for case in cases.values():
        flags = case.flags()
        more = dict(flags[FIXED].items() ^ flags[ADAPTIVE].items())
        assert more == (case.numbers if case.by_default else {"speculative_adaptive": True})


def test_memory_is_for_the_largest_load() -> None:
    bounds = bounds_of(TARGETS["8b"], {"random": [[1] * 128] * 256}, 131072)
    assert bounds["max_total_tokens"] == 256 * (128 + 192 + 64) and bounds["context_length"] == 4096
    assert bounds["cuda_graph_bs"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_plain_decoding_is_measured_once_and_counts_for_every_case() -> None:
    keys = {PLAIN_KEY: 10.0, ("a", FIXED): 12.0, ("a", ADAPTIVE): 11.0, ("b", FIXED): 8.0, ("b", ADAPTIVE): 9.0}
    names = ("step_ms", "device_ms", "accept_length", "guesses")
    runs = {
        key: [{"tokens_per_second": speed * share, **dict.fromkeys(names, 1.0)} for share in (0.5, 1.0, 1.1)]
        for key, speed in keys.items()
    }
    rows = list(rows_of(Load("chat20", 8, 40, 128), runs))
    assert [(row["case"], row["policy"]) for row in rows if row["policy"] == "plain"] == [
        ("a", "plain"),
        ("b", "plain"),
    ]
    speeds = {(row["case"], row["policy"]): row["tokens_per_second"] for row in rows}
    adaptive = [speeds[case, "adaptive"] / speeds[case, "plain"] for case in ("a", "b")]
    assert adaptive == pytest.approx([1.1, 0.9])


def test_a_case_without_one_of_its_engines_is_left_out() -> None:
    engines = Engines(dict.fromkeys([PLAIN_KEY, ("a", FIXED), ("a", ADAPTIVE), ("b", FIXED)]), {"b": "adaptive: none"})
    assert list(engines.compared()) == [PLAIN_KEY, ("a", FIXED), ("a", ADAPTIVE)]


def test_no_load_is_begun_that_may_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run({}, None, ends_at=10.0)
    monkeypatch.setattr(width_policy.time, "monotonic", lambda: 7.0)
    assert run.has_time(2.9) and not run.has_time(3.1)
    assert time.monotonic() == 7.0
