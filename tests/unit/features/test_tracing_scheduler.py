"""The traced loop plans the same steps, and leaves a record of every plan, every result and every reply."""

from pathlib import Path
from typing import Any

from support.fake_device import Bench, make_admit, make_ready
from support.plans import parts_of

from overlap_spec.features.tracing.scheduler import TracedScheduler
from overlap_spec.runtime.tracing import SCHEDULER, Trace, read_records
from overlap_spec.scheduler.loop import Scheduler


def answered(**options: Any) -> Bench:
    bench = Bench(make_ready(), **options)
    for uid in (1, 2, 3):
        bench.admit(make_admit(uid, list(range(1, 6 + uid)), 9))
    bench.finish_all()
    bench.check_streams()
    return bench


def test_every_step_leaves_a_plan_and_a_settle(tmp_path: Path) -> None:
    trace = Trace(SCHEDULER, tmp_path)
    traced = answered(trace=trace)
    assert type(traced.scheduler) is TracedScheduler and type(answered().scheduler) is Scheduler
    assert traced.all_plans == answered().all_plans
    trace.write()
    records = read_records(tmp_path)
    steps = [plan.step_id for plan in traced.all_plans]
    plans = [record for record in records if record.name == "plan"]
    assert [record.step for record in plans] == steps
    assert [record.args["batch"] for record in plans] == [len(parts_of(plan)) for plan in traced.all_plans]
    assert {record.args["in_flight"] for record in plans} == {1, 2}
    assert [record.step for record in records if record.name == "settle"] == steps
    assert {record.name for record in records} == {"plan", "settle", "send deltas"}
