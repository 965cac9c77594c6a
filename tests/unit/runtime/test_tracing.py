"""Records of one process: kept, bounded, written, read back in order."""

from pathlib import Path

from overlap_spec.runtime.tracing import (
    GPU,
    MOST_LIVE_RECORDS,
    NO_TRACE,
    SCHEDULER,
    WORKER,
    LiveTrace,
    Record,
    Trace,
    read_records,
    recorder,
)


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


def test_who_watches_sees_what_happens_meanwhile() -> None:
    now = 10.0
    trace = LiveTrace(SCHEDULER, lambda: now)
    trace.instant("unseen")
    begin = trace.now()
    trace.watch(5.0)
    trace.span("begun before", begin)
    assert trace.is_on and trace.take() == []
    begin, now = trace.now(), 12.0
    trace.span("plan", begin, 7, batch=2)
    assert trace.take() == [Record(SCHEDULER, "plan", 10.0, 12.0, 7, {"batch": 2})]
    assert trace.take() == []
    trace.watch(0.0)
    trace.instant("still")
    assert [record.name for record in trace.take()] == ["still"]


def test_it_keeps_nothing_once_nobody_asks() -> None:
    now = 10.0
    trace = LiveTrace(SCHEDULER, lambda: now)
    trace.watch(5.0)
    now = 15.1
    trace.instant("the last")
    trace.instant("unseen")
    assert not trace.is_on and trace.now() == 0.0
    trace.watch(5.0)
    assert trace.is_on and trace.take() == []
    for step in range(2 * MOST_LIVE_RECORDS):
        trace.instant("x", step)
    assert [record.step for record in trace.take()] == list(range(MOST_LIVE_RECORDS, 2 * MOST_LIVE_RECORDS))


def test_a_process_is_watched_only_where_that_was_asked_for() -> None:
    assert isinstance(recorder("scheduler", None, watched=True), LiveTrace)
    assert recorder("scheduler", None) is NO_TRACE
