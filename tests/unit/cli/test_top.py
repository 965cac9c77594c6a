"""`overlap-spec top` before a server that answers what the test has planned, with the real server's `/metrics`."""

import io
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from support.audit_reports import NOTHING_AUDITED

from overlap_spec.entrypoints.cli import main
from overlap_spec.entrypoints.top import Watch, duration, figures, local_url, shown, three
from overlap_spec.entrypoints.top.figures import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Answer,
    Figures,
    Percentiles,
    Scraper,
    figures_of,
    quantile,
    samples_in,
)
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import AdaptFigures, DraftFigures, DraftState, EngineHealth, EngineState, Stats
from overlap_spec.metrics.prometheus import Served, ServerMetrics
from overlap_spec.runtime.run_directory import RunDirectory

HEALTH = EngineHealth(EngineState.READY, since_s=75.0, last_sign_s={"frontend": 0.25, "worker": 1.5})
STATS = Stats(
    num_running=3,
    num_queued=2,
    gen_throughput=1234.5,
    accept_length=2.625,
    prompt_tokens_total=1000,
    cached_tokens_total=400,
    requests_total=12,
    step_time=0.00412,
    step_efficiency=0.62,
    experts_read=41.52,
    num_experts=128,
    snapshot_bytes=3 << 20,
    max_snapshot_bytes=12 << 20,
    snapshot_lookups_total=8,
    snapshot_hits_total=6,
    recoveries_total=1,
    last_recovery=4.5,
    draft_classes={"greedy": DraftFigures(DraftState.COLLAPSED, 1.2, 2.9)},
    adapt=AdaptFigures(versions=3, steps=64, samples=17, live_length=2.5, copy_length=2.75, gain=0.14),
)

SERVED = Served("tiny", "EAGLE3", "1.2.3", 48, 2048, ranks=2)


@dataclass
class Played:
    """A server: its metrics, its state and the key that it wants."""

    metrics: ServerMetrics = field(default_factory=lambda: ServerMetrics(SERVED))
    health: EngineHealth = HEALTH
    key: str = ""
    url: str = ""

    def answer(self, path: str, authorization: str) -> tuple[int, bytes]:
        if path == "/health":
            return 200, msgspec.json.encode(self.health)
        if self.key and authorization != f"Bearer {self.key}":
            return 401, b""
        starts = self.health.state is EngineState.STARTING
        return (503, b"") if starts else (200, self.metrics.render(self.health))


@pytest.fixture
def played() -> Iterator[Played]:
    server = Played()
    server.metrics.update(STATS, NOTHING_AUDITED.figures)
    for seconds in (0.1,) * 9 + (0.5,):
        server.metrics.first_token.observe(seconds)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = server.answer(self.path, self.headers.get("authorization", ""))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        http.shutdown()


def look(played: Played) -> Figures:
    return Watch(Scraper(played.url, None)).look()


def lines_of(each: Figures, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown(each, width))
    return console.export_text().splitlines()


def test_figures_are_the_metrics(played: Played) -> None:
    found = look(played)
    assert (found.state, found.since_s, found.last_sign_s) == ("ready", 75.0, HEALTH.last_sign_s)
    assert (found.model, found.method, found.version, found.ranks) == ("tiny", "EAGLE3", "1.2.3", 2)
    assert (found.num_running, found.num_slots, found.num_queued, found.most_queued) == (3, 48, 2, 2048)
    assert (found.tokens_per_s, found.accept_length, found.prefix_hits) == (1234.5, 2.625, 0.4)
    assert (found.step_time_s, found.step_efficiency, found.recoveries) == (0.00412, 0.62, 1)
    assert (found.experts_read, found.num_experts) == (41.52, 128)
    assert (found.snapshot_hits, found.snapshot_lookups) == (6, 8)
    text = "\n".join(lines_of(found, 120))
    assert (found.adapt_versions, found.adapt_gain) == (3, 0.14) and "3, last gain 14" in text
    assert "3 of 12 MiB" in text and "75" in text
    assert found.classes == {"greedy": figures.ClassFigures(1.2, 2.9, True)}
    assert msgspec.structs.astuple(found.first_token_s) == pytest.approx((0.05 + 0.05 * 5 / 9, 0.1, 0.58))
    assert found.inter_token_s == Percentiles(None, None, None)
    assert found.window_s is None


def test_ranks_are_named_where_there_are_several(played: Played) -> None:
    """And each has a heartbeat of its own."""
    played.health = replace(HEALTH, last_sign_s={"worker": 1.5, "worker-1": 0.5})
    found = look(played)
    assert "EAGLE3  2 ranks" in lines_of(found, 120)[0] and any("worker-1" in line for line in lines_of(found, 120))
    assert "ranks" not in lines_of(replace(found, ranks=1), 120)[0]


def test_every_metric_that_is_read_is_there(played: Played) -> None:
    """A metric that is renamed would be shown as missing, for ever."""
    names = samples_in(played.metrics.render(HEALTH).decode()).keys()
    wanted = [*GAUGES.values(), *(f"{name}_total" for name in COUNTERS.values())]
    wanted += [f"{name}_bucket" for name in HISTOGRAMS.values()]
    assert {name for name in wanted if f"overlap_spec:{name}" not in names} == set()


def test_a_second_look_counts_from_the_first(played: Played) -> None:
    watch = Watch(Scraper(played.url, None))
    watch.look()
    played.metrics.update(replace(STATS, prompt_tokens_total=1100, cached_tokens_total=490))
    played.metrics.first_token.observe(3.0)
    found = watch.look()
    assert found.window_s is not None and found.prompt_tokens_per_s == pytest.approx(100 / found.window_s)
    assert found.prefix_hits == 0.9
    assert found.first_token_s.p50 == 3.0, "the middle of its bucket, of 2 to 4 seconds"


def test_a_server_that_was_started_again_is_counted_anew(played: Played) -> None:
    watch = Watch(Scraper(played.url, None))
    watch.look()
    played.metrics.update(Stats(requests_total=1, prompt_tokens_total=10, cached_tokens_total=5))
    found = watch.look()
    assert (found.window_s, found.prefix_hits) == (None, 0.5)


def test_a_server_that_starts_shows_its_state_and_no_figures(played: Played) -> None:
    played.health = EngineHealth(EngineState.STARTING, "the engine is starting: loading", "worker", 3.0)
    text = "\n".join(lines_of(look(played), 80))
    assert "starting for 3 s" in text and "the engine is starting: loading" in text
    assert "accept length" not in text


@pytest.mark.parametrize("width", [32, 40, 80, 120, 200])
def test_every_width_has_every_figure(width: int, played: Played) -> None:
    lines = lines_of(look(played), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())  # where it is narrow, values go on in a second line
    speeds, places = ("2.62", "1,234", "62.0%", "4.12 ms", "77.8 /", "580 ms"), ("3 of 48", "41.5 of 128", "frontend")
    for words in (*speeds, *places, "ready for 1 min"):
        assert words in text, words


def test_what_is_wrong_stands_out(played: Played) -> None:
    console = Console(width=80, force_terminal=True, record=True, file=io.StringIO())
    console.print(shown(look(played), 80))
    text = console.export_text(styles=True)
    for words in ("1.20, usually 2.90", "1, last took 4.5 s", "2 of 2,048"):
        assert re.search(rf"\x1b\[[\d;]+m *{re.escape(words)}", text), words


def test_the_command_prints_a_table_once(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    for further in ((), ("--once",)):  # no terminal is as good as the flag
        assert main(["top", "--url", played.url, *further]) == 0
        out = capsys.readouterr().out
        assert played.url in out and "accept length" in out and "\x1b" not in out


def test_json_is_the_record(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", played.url + "/", "--once", "--json"]) == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out), Figures)
    assert (found.num_running, found.url) == (3, played.url)


def test_a_key_is_taken_from_a_file_or_asked_for(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OVERLAP_SPEC_API_KEY", raising=False)
    played.key = "sk-1"
    assert main(["top", "--url", played.url, "--once"]) == 1
    assert capsys.readouterr().err == f"overlap-spec: {played.url} wants an API key: give --api-key-file\n"
    (tmp_path / "keys").write_text("ops:sk-1\n")
    assert main(["top", "--url", played.url, "--once", "--api-key-file", str(tmp_path / "keys")]) == 0


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://127.0.0.1:9", "cannot be reached"), ("no-url", "cannot be reached"), ("http://[", "cannot be reached")],
)
def test_a_server_that_cannot_be_reached_is_one_sentence(
    url: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("overlap-spec: ") and words in error and error.count("\n") == 1


def test_another_server_is_no_server_of_this_engine(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Played, "answer", lambda *asked: (200, b"OK"))
    with pytest.raises(OverlapSpecError, match="is no server of this engine"):
        look(played)


def test_the_server_of_this_machine_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OverlapSpecError, match="no server of this user"):
        local_url()
    one, silent = RunDirectory(tmp_path), RunDirectory(tmp_path)
    one.announce("http://127.0.0.1:1")
    assert local_url() == "http://127.0.0.1:1", "a run without a server has no address"
    silent.announce("http://127.0.0.1:2")
    with pytest.raises(OverlapSpecError, match=r"2 servers are running: .* http://127.0.0.1:1, http://127.0.0.1:2"):
        local_url()
    silent._lock.close()  # its process was killed
    assert local_url() == "http://127.0.0.1:1"
    one.remove()
    silent.remove()


def test_a_server_that_goes_away_leaves_its_last_figures(played: Played) -> None:
    before = Answer("http://a", HEALTH, samples_in(played.metrics.render(HEALTH).decode()), at=100.0)
    found = replace(figures_of(before), state="no answer", reason="http://a cannot be reached")
    text = "\n".join(lines_of(found, 100))
    assert "no answer" in text and "cannot be reached" in text and "2.62" in text


@pytest.mark.parametrize(("of", "wanted"), [(0.0, 0.1), (0.25, 0.15), (0.5, 0.2), (0.625, 0.6), (0.9, 1.0), (1.0, 1.0)])
def test_a_quantile_is_linear_within_its_bucket(of: float, wanted: float) -> None:
    """Four in the second bucket, two in the third of 0.2 to 1, two above all bounds."""
    buckets = [(0.1, 0.0), (0.2, 4.0), (1.0, 6.0), (float("inf"), 8.0)]
    assert quantile(buckets, of) == pytest.approx(wanted)


def test_no_observation_has_no_quantile() -> None:
    assert quantile([], 0.5) is None
    assert quantile([(0.1, 0.0), (float("inf"), 0.0)], 0.5) is None


def test_units() -> None:
    assert [duration(each) for each in (None, 0.0, 0.00412, 0.9996, 1.0, 59.94, 90.0)] == [
        *("-", "0 ms", "4.12 ms", "1e+03 ms", "1 s", "59.9 s", "2 min"),
    ]
    assert three(Percentiles(0.0105, 0.03, 0.999)) == "10.5 / 30 / 999 ms"
    assert three(Percentiles(0.5, 1.25, 2000.0)) == "0.5 / 1.25 / 2,000 s"
