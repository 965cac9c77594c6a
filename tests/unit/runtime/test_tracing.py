"""Records of one process: kept, bounded, written, read back in order."""

from pathlib import Path

from overlap_spec.runtime.tracing import GPU, NO_TRACE, SCHEDULER, WORKER, Record, Trace, read_records, recorder


def test_records_come_back_by_time(tmp_path: Path) -> None:
    scheduler, worker = Trace(SCHEDULER, tmp_path), Trace(WORKER, tmp_path)
    worker.add(Record(GPU, "verify", 3.0, 4.0, 7, {"batch": 2, "part": "x"}))
    worker.add(Record(WORKER, "inner", 1.0, 1.5))
    worker.add(Record(WORKER, "outer", 1.0, 2.0))
    scheduler.add(Record(SCHEDULER, "plan", 0.5, 0.6, 7))
    scheduler.write()
    worker.write()
    records = read_records(tmp_path)
    assert [record.name for record in records] == ["plan", "outer", "inner", "verify"]
    assert records[-1] == Record(GPU, "verify", 3.0, 4.0, 7, {"batch": 2, "part": "x"})


def test_a_span_ends_now_and_an_instant_has_no_length(tmp_path: Path) -> None:
    trace = recorder("worker", str(tmp_path))
    begin = trace.now()
    trace.span("launch", begin, 3, batch=1)
    trace.instant("received", 3)
    trace.write()
    span, instant = read_records(tmp_path)
    assert (span.track, span.name, span.step, span.args) == (WORKER, "launch", 3, {"batch": 1})
    assert span.begin == begin <= span.end <= instant.begin == instant.end


def test_memory_is_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    trace = Trace(SCHEDULER, tmp_path, most=10)
    for step in range(25):
        trace.instant("x", step)
    trace.write()
    assert [record.step for record in read_records(tmp_path)] == list(range(15, 25))


def test_nothing_is_kept_where_nobody_asks(tmp_path: Path) -> None:
    trace = recorder("scheduler", None)
    assert trace is NO_TRACE
    trace.span("x", trace.now(), 1, a=2)
    trace.instant("x")
    trace.add(Record(GPU, "x", 0.0, 1.0))
    trace.write()
    assert not list(tmp_path.iterdir())
