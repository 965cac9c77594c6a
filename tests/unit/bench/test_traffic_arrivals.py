"""Arrivals: files and their errors, prompts, lengths, and how requests are shared among processes."""

import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from overlap_spec.bench.traffic.arrivals import (
    ANSWERS,
    PROMPTS,
    Arrival,
    Lengths,
    Poisson,
    conversations,
    long_prompt,
    prompt_of,
    read_arrivals,
    shared_out,
    with_rows,
    write_arrivals,
)
from overlap_spec.bench.traffic.processes import Load, Target
from overlap_spec.errors import ConfigError

GOOD = '{"at": 0, "prompt_len": 3, "output_len": 2, "id": "a"}'


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"at": 0, "prompt_len": 3, "output_len": "2"}', r"\$\.output_len"),
        ('{"at": 0, "prompt_len": 3}', "`output_len`"),
        ('{"at": 0, "prompt_len": 3, "output_len": 2, "max_tokens": 3}', "`max_tokens`"),
        ('{"at": -1, "prompt_len": 3, "output_len": 2}', "at: must be seconds from 0 on, got -1"),
        ('{"at": 0, "prompt_len": 3, "output_len": 0}', "output_len: must be at least 1, got 0"),
        ('{"at": 0, "output_len": 2}', "prompt_len: give either"),
        ('{"at": 0, "prompt": "x", "prompt_len": 3, "output_len": 2}', "prompt_len: give either"),
        ('{"at": 0, "prompt_len": -3, "output_len": 2}', "prompt_len: give either"),
        ('{"at": 0, "prompt": [], "output_len": 2}', "prompt: is empty"),
        ('{"at": 0, "prompt_len": 3, "output_len": 2, "row": -1}', "row: must be at least 0"),
        ('{"at": 0, "prompt_len": 3, "output_len": 2, "id": "a"}', "id: 'a' is the id of an earlier line"),
        ('{"at": 0, "prompt_len": 3, "output_len": 2, "after": "b"}', "after: 'b' is the id of no earlier line"),
        ('{"at": 0, "prompt_len": 3, "output_len": 2, "body": {"max_tokens": 3}}', "body: max_tokens is set"),
        ("{at: 0}", "malformed"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ConfigError, match=f"--arrivals: .*arrivals.jsonl line 3: .*{what}"):
        read_arrivals(str(path))


def test_a_file_that_is_missing_or_has_no_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_arrivals(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="has no requests"):
        read_arrivals(str(tmp_path / "empty"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "arrivals.jsonl")
    arrivals = [*long_prompt(100, 2, 8), Arrival(at=0.5, prompt="x", output_len=1, body={"top_p": 0.5})]
    write_arrivals(path, arrivals)
    assert read_arrivals(path) == arrivals


def test_prompts_have_their_exact_length_and_share_a_beginning_only_in_a_row() -> None:
    arrivals = with_rows([Arrival(at=0.0, prompt_len=40, output_len=1) for _ in range(50)])
    prompts = [prompt_of(arrival, 32000, seed=0) for arrival in arrivals]
    assert all(len(prompt) == 40 for prompt in prompts)
    assert all(5 <= token < 32000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 50
    assert prompt_of(arrivals[0], 32000, seed=1)[:3] != prompts[0][:3]
    first, second = (Arrival(at=0.0, prompt_len=count, output_len=1, row=7) for count in (500, 731))
    assert prompt_of(second, 32000, seed=3)[:500] == prompt_of(first, 32000, seed=3)


@pytest.mark.parametrize("lengths", [PROMPTS, ANSWERS], ids=["prompts", "answers"])
def test_lognormal_lengths(lengths: Lengths) -> None:
    """The median of a clipped lognormal is exp(mean), and a normal's share lies within a sigma of it."""
    drawn = lengths.draw(random.Random(0), 20_000)
    assert min(drawn) == lengths.least and max(drawn) == lengths.most
    assert math.log(statistics.median(drawn)) == pytest.approx(lengths.mean, abs=0.03)
    inside = [abs(math.log(count) - lengths.mean) < lengths.sigma for count in drawn]
    assert statistics.mean(inside) == pytest.approx(0.6827, abs=0.015)


def test_poisson_arrivals_have_their_rate_and_lengths_that_do_not_depend_on_it() -> None:
    slow, fast = Poisson(16.0).arrivals(4000, seed=1), Poisson(32.0).arrivals(4000, seed=1)
    assert slow[0].at == 0.0 and slow[-1].at == pytest.approx(4000 / 16, rel=0.05)
    waits = [later.at - arrival.at for arrival, later in pairwise(slow)]
    assert statistics.stdev(waits) == pytest.approx(statistics.mean(waits), rel=0.05)  # as of an exponential
    assert [(a.prompt_len, a.output_len) for a in slow] == [(a.prompt_len, a.output_len) for a in fast]
    assert slow == Poisson(16.0).arrivals(4000, seed=1) != Poisson(16.0).arrivals(4000, seed=2)
    assert {arrival.at for arrival in Poisson(math.inf).arrivals(10, seed=1)} == {0.0}
    assert Poisson(16.0).count_for(20.0) == 320


def test_turns_of_a_conversation_follow_each_other_and_share_their_prompts() -> None:
    turns = conversations(num_streams=2, num_turns=3, first=8000, more=200, answer=4)
    mine = [turn for turn in turns if turn.row == 1]
    assert [(turn.id, turn.after, turn.prompt_len) for turn in mine] == [
        ("1.0", "", 8000),
        ("1.1", "1.0", 8200),
        ("1.2", "1.1", 8400),
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_waits_for_a_request_is_in_its_process(count: int) -> None:
    parts = shared_out(conversations(4, 3, 10, 1, 1), count)
    assert sum(len(part) for part in parts) == 12
    assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 3
    for part in parts:
        known: set[str] = set()
        for arrival in part:
            assert not arrival.after or arrival.after in known
            known.add(arrival.id)


def test_a_prompt_is_the_same_in_whatever_process_it_is_sent_from() -> None:
    arrivals = [Arrival(at=0.0, prompt_len=20, output_len=1) for _ in range(5)]

    def prompts(count: int) -> set[tuple[int, ...]]:
        jobs = Load(Target(url="http://x"), arrivals, count).jobs()
        return {tuple(prompt_of(arrival, 32000, job.seed)) for job in jobs for arrival in job.arrivals}

    assert len(prompts(1)) == 5 and prompts(1) == prompts(2) == prompts(3)


def test_requests_at_once_are_shared_among_processes() -> None:
    arrivals = [Arrival(at=0.0, prompt_len=20, output_len=1) for _ in range(9)]
    jobs = Load(Target(url="http://x"), arrivals, 3, max_concurrency=5).jobs()
    assert [job.max_concurrency for job in jobs] == [2, 2, 1] and sum(len(job.arrivals) for job in jobs) == 9
