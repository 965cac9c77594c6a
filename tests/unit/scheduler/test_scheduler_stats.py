"""Reports: when they leave, what they say, and the words of the log line."""

import logging

from support.fake_device import Bench, make_admit, make_ready

from overlap_spec.messages import Phase

PROMPT = list(range(1, 11))


def busy_bench(seconds_per_step: float, max_new: int = 60, **changes) -> Bench:
    bench = Bench(make_ready(**changes))
    bench.admit(make_admit(1, PROMPT, max_new))
    while bench.plans:
        bench.run_device()
        bench.now += seconds_per_step
        bench.deliver_result()
    return bench


def test_reports_leave_about_once_a_second_and_when_work_ends():
    bench = busy_bench(0.3)
    num_steps = len(bench.all_plans)
    assert abs(len(bench.stats) - 0.3 * num_steps / 1.2) <= 2
    last = bench.stats[-1]
    assert (last.num_running, last.num_queued, last.num_used_tokens) == (0, 0, 0)
    assert last.generation_tokens_total == 60 and last.prompt_tokens_total == 10 and last.requests_total == 1
    assert last.steps_total == num_steps
    assert all(stats.num_used_tokens > 0 and 0 < stats.token_usage <= 1 for stats in bench.stats[:-1])


def test_rates_are_those_of_the_interval():
    bench = busy_bench(0.5, max_new=200)
    middle = bench.stats[1:-1]
    before = bench.stats[0].generation_tokens_total
    for stats in middle:
        assert stats.gen_throughput == (stats.generation_tokens_total - before) / 1.0
        before = stats.generation_tokens_total
        assert 1 <= stats.accept_length <= 4
        assert abs(stats.step_time - 0.001) < 1e-9
    assert middle


def test_nothing_is_said_while_idle():
    bench = busy_bench(0.01, max_new=4)
    said = len(bench.stats)
    bench.now += 100
    bench.scheduler.send_replies()
    assert len(bench.stats) == said == 1 and not bench.frontend.drain()


def test_the_log_line_has_the_words_people_search_for(caplog):
    with caplog.at_level(logging.INFO):
        bench = busy_bench(1.1)
    lines = [record.getMessage() for record in caplog.records]
    prefill = [
        line for line in lines if line.startswith("Prefill batch, #new-seq: 1, #new-token: 10, #cached-token: 0")
    ]
    decode = [line for line in lines if line.startswith("Decode batch, #running-req: ")]
    assert len(prefill) == 1 and "#queue-req: 0" in prefill[0]
    num_steps = sum(plan.phase is Phase.DECODE for plan in bench.all_plans)
    assert 2 <= len(decode) <= 2 + num_steps * 1.1 / 5
    for word in ("#token: ", "token usage: 0.", "accept len: ", "gen throughput (token/s): ", "#queue-req: "):
        assert word in decode[0]


def test_plain_decoding_logs_no_accept_length(caplog):
    with caplog.at_level(logging.INFO):
        busy_bench(1.1, width=1)
    assert caplog.records and not any("accept len" in record.getMessage() for record in caplog.records)
