"""The text of `/metrics`, against figures computed by hand, and read back by the library's own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from overlap_spec.messages import DraftFigures, DraftState, EngineHealth, EngineState, Stats
from overlap_spec.metrics import prometheus
from overlap_spec.metrics.prometheus import ServerMetrics, WeightedHistogram

STATS = Stats(
    num_running=3,
    num_queued=2,
    token_usage=0.25,
    gen_throughput=100.5,
    accept_length=2.5,
    prompt_tokens_total=1000,
    cached_tokens_total=400,
    generation_tokens_total=500,
    verify_steps_total=200,
    committed_tokens_total=460,
    proposed_tokens_total=600,
    requests_total=12,
    aborted_total=1,
    drafts_total=190,
    accept_rate=0.4,
    step_width=4,
    num_steps=3,
    draft_is_dead=True,
    preempted_total=4,
    recomputed_tokens_total=70,
    accepted_per_position_total=(150, 80, 30),
)


def samples(metrics: ServerMetrics, stats: Stats) -> dict[str, float]:
    """`name{label=value}` -> value."""
    found = {}
    metrics.update(stats)
    health = EngineHealth(EngineState.UNRESPONSIVE, last_sign_s={"worker": 1.5})
    for family in text_string_to_metric_families(metrics.render(health).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_every_figure_of_the_engine() -> None:
    found = samples(ServerMetrics(), STATS)
    want = {
        "overlap_spec:last_sign_seconds{process=worker}": 1.5,
        "overlap_spec:engine_state{state=unresponsive}": 1,
        "overlap_spec:engine_state{state=ready}": 0,
        "overlap_spec:num_running_reqs": 3,
        "overlap_spec:num_queue_reqs": 2,
        "overlap_spec:token_usage": 0.25,
        "overlap_spec:gen_throughput": 100.5,
        "overlap_spec:spec_accept_length": 2.5,
        "overlap_spec:spec_accept_rate": 0.4,
        "overlap_spec:spec_num_steps": 3,
        "overlap_spec:spec_num_draft_tokens": 4,
        "overlap_spec:spec_draft_dead": 1,
        "overlap_spec:prompt_tokens_total": 1000,
        "overlap_spec:generation_tokens_total": 500,
        "overlap_spec:cached_tokens_total": 400,
        "overlap_spec:num_requests_total": 12,
        "overlap_spec:num_aborted_requests_total": 1,
        "overlap_spec:num_retracted_requests_total": 4,
        "overlap_spec:recomputed_tokens_total": 70,
        "overlap_spec:spec_verify_calls_total": 200,
        "vllm:spec_decode_num_drafts_total": 190,
        "vllm:spec_decode_num_draft_tokens_total": 600,
        "vllm:spec_decode_num_accepted_tokens_total": 260,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 150,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=1}": 80,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=2}": 30,
    }
    assert {name: found[name] for name in want} == want


def test_what_vllm_bench_reads() -> None:
    """It takes lines that start so and end in `_total` before a label, and their last word as the value."""
    metrics = ServerMetrics()
    metrics.update(STATS)
    lines = metrics.render().decode().splitlines()
    drafts = [line for line in lines if line.startswith("vllm:spec_decode")]
    assert len(drafts) == 6
    assert all(len(line.split()) == 2 and float(line.split()[-1]) > 0 for line in drafts)


def test_plain_decoding_counts_no_drafts() -> None:
    found = samples(ServerMetrics(), Stats(verify_steps_total=50, committed_tokens_total=50))
    assert found["vllm:spec_decode_num_drafts_total"] == 0
    assert found["overlap_spec:spec_verify_calls_total"] == 50


def test_a_chunk_of_k_tokens_counts_k_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(prometheus.time, "perf_counter", lambda: now)
    metrics = ServerMetrics()
    timer = metrics.start_request()
    for at, count in ((100.3, 1), (100.34, 4), (100.35, 0), (100.44, 2)):
        now = at
        timer.tokens(count)
    timer.finished()
    found = samples(metrics, Stats())
    prefix = "overlap_spec:inter_token_latency_seconds"
    assert found[f"{prefix}_count"] == 6
    assert found[f"{prefix}_sum"] == pytest.approx(0.14)
    assert found[f"{prefix}_bucket{{le=0.008}}"] == 0
    assert found[f"{prefix}_bucket{{le=0.015}}"] == 4  # 10 ms each, give or take rounding
    assert found[f"{prefix}_bucket{{le=0.06}}"] == 6
    assert found["overlap_spec:time_to_first_token_seconds_sum"] == pytest.approx(0.3)
    assert found["overlap_spec:e2e_request_latency_seconds_sum"] == pytest.approx(0.44)


def test_a_request_without_a_token_counts_nowhere() -> None:
    metrics = ServerMetrics()
    metrics.start_request().finished()
    found = samples(metrics, Stats())
    assert all(found[name] == 0 for name in found if name.endswith("_count"))


def test_servers_do_not_share_a_registry() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    first.first_token.observe(0.1)
    assert samples(second, Stats())["overlap_spec:time_to_first_token_seconds_count"] == 0


def test_histogram_bounds_are_upper_and_inclusive() -> None:
    histogram = WeightedHistogram((1.0, 2.0))
    for value, weight in ((0.5, 1), (1.0, 2), (1.5, 3), (2.5, 4)):
        histogram.observe(value, weight)
    assert histogram.buckets() == [("1.0", 3.0), ("2.0", 6.0), ("+Inf", 10.0)]
    assert histogram.total == 0.5 + 2.0 + 4.5 + 10.0


def test_step_figures() -> None:
    stats = Stats(step_time=0.002, step_efficiency=0.75, gpu_gap=1e-5, host_time=3e-4, host_time_hidden=2.9e-4)
    found = samples(ServerMetrics(), stats)
    want = {
        "overlap_spec:step_time_seconds": 0.002,
        "overlap_spec:step_efficiency": 0.75,
        "overlap_spec:gpu_gap_seconds": 1e-5,
        "overlap_spec:host_time_seconds": 3e-4,
        "overlap_spec:host_time_hidden_seconds": 2.9e-4,
    }
    assert {name: found[name] for name in want} == want


def test_experts_are_reported_of_mixtures_alone() -> None:
    shown = samples(ServerMetrics(), Stats(experts_read=41.5, num_experts=128))
    assert (shown["overlap_spec:experts_read"], shown["overlap_spec:num_experts"]) == (41.5, 128)
    assert not [name for name in samples(ServerMetrics(), Stats()) if "experts" in name]


def test_snapshots_of_recurrent_states_have_figures() -> None:
    figures = Stats(snapshot_bytes=3, max_snapshot_bytes=9, snapshot_lookups_total=4, snapshot_hits_total=2)
    shown = samples(ServerMetrics(), figures)
    names = ("snapshot_bytes", "snapshot_max_bytes", "snapshot_lookups_total", "snapshot_hits_total")
    assert [shown[f"overlap_spec:state_{name}"] for name in names] == [3, 9, 4, 2]
    assert "overlap_spec:state_snapshot_bytes" not in samples(ServerMetrics(), Stats())
    assert not any("experts" in name for name in samples(ServerMetrics(), Stats()))


def test_an_unknown_efficiency_is_left_out() -> None:
    assert "overlap_spec:step_efficiency" not in samples(ServerMetrics(), Stats())


@pytest.mark.parametrize("state", DraftState)
def test_a_draft_that_is_dead_has_collapsed(state: DraftState) -> None:
    stats = Stats(draft_classes={"greedy": DraftFigures(state, 1.0, 2.5)})
    text = ServerMetrics()
    text.update(stats)
    (family,) = [each for each in text_string_to_metric_families(text.render().decode()) if "collapsed" in each.name]
    bad = state in (DraftState.COLLAPSED, DraftState.DEAD)
    assert [(sample.labels["class"], sample.value) for sample in family.samples] == [("greedy", bad)]


@pytest.mark.parametrize("state", EngineState)
def test_an_engine_is_in_one_state(state: EngineState) -> None:
    text = ServerMetrics().render(EngineHealth(state)).decode()
    (family,) = [each for each in text_string_to_metric_families(text) if each.name.endswith("engine_state")]
    assert [sample.labels["state"] for sample in family.samples if sample.value] == [state.value]
