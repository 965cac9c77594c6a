"""Step time, efficiency and gap, from results whose times are made up."""

import msgspec
import pytest
from support.fake_device import Bench, make_admit, make_ready

from overlap_spec.messages import ForwardShape, Phase, Roofline

PROMPT = list(range(1, 11))
WIDTH = 4
ROOFLINE = Roofline(1e6, 0.0, ForwardShape(weight_bytes=400), ForwardShape(weight_bytes=30), ForwardShape(20))
FLOOR = (400 + 30 + 2 * 20) / 1e6
GAP, LAUNCH = 0.0002, 0.0001


def run(bench: Bench, uid: int, max_new: int = 200) -> None:
    """One request to its end; the first step of a request comes after a pause of a second."""
    bench.admit(make_admit(uid, PROMPT, max_new))
    first = True
    while bench.plans:
        bench.run_device()
        bench.now += 0.3
        result = bench.results[0]
        gap = 1.0 if first else GAP
        bench.results[0] = msgspec.structs.replace(result, gpu_gap=gap, launch_time=LAUNCH)
        bench.deliver_result()
        first = False


def test_efficiency_is_floor_over_time_and_gap() -> None:
    bench = Bench(make_ready(roofline=ROOFLINE))
    run(bench, 1)
    steady = bench.stats[1:-1]  # decode steps only
    assert steady
    for stats in steady:
        assert stats.step_time == pytest.approx(0.001)
        assert stats.gpu_gap == pytest.approx(GAP)
        assert stats.step_efficiency == pytest.approx(FLOOR / (0.001 + GAP))
    decode_steps = sum(plan.phase is Phase.DECODE for plan in bench.all_plans)
    assert bench.stats[-1].decode_steps_total == decode_steps
    assert bench.stats[-1].decode_floor_total == pytest.approx(decode_steps * FLOOR)


def test_the_gap_after_an_idle_time_is_nobodys_fault() -> None:
    bench = Bench(make_ready(roofline=ROOFLINE))
    for uid in (1, 2):
        run(bench, uid)
    assert all(stats.gpu_gap <= GAP * (1 + 1e-9) for stats in bench.stats)
    assert bench.scheduler.planner.counters.following_steps == len(bench.all_plans) - 2


def test_host_time_is_hidden_but_for_the_gap() -> None:
    bench = Bench(make_ready(roofline=ROOFLINE))
    reporter = bench.scheduler.reporter
    bench.admit(make_admit(1, PROMPT, 200))
    while bench.plans:
        bench.run_device()
        bench.now += 0.3
        bench.results[0] = msgspec.structs.replace(bench.results[0], gpu_gap=GAP, launch_time=LAUNCH)
        reporter.resume()
        bench.now += 0.0004
        reporter.pause()
        bench.deliver_result()
    for stats in bench.stats[1:-1]:
        assert stats.host_time == pytest.approx(0.0004 + LAUNCH)
        assert stats.host_time_hidden == pytest.approx(0.0004 + LAUNCH - GAP)


def test_without_ceilings_there_is_no_efficiency() -> None:
    bench = Bench(make_ready())
    run(bench, 1)
    assert all(stats.step_efficiency is None for stats in bench.stats)
