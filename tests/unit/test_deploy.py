"""What `deploy/` says of the server is so: flags, paths, times that depend on each other, files that are mounted."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.service_unit import UNIT, command_of, is_started_again, settings_of

from overlap_spec import EngineConfig
from overlap_spec.entrypoints import cli
from overlap_spec.entrypoints.cli.flags import engine_config
from overlap_spec.entrypoints.cli.service import CLOSE_S
from overlap_spec.entrypoints.http.auth import SHALLOW
from overlap_spec.entrypoints.http.request_spans import SPANS_S
from overlap_spec.entrypoints.http.streams import GOODBYE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
STOP_S = CLOSE_S + GOODBYE_S + SPANS_S  # after the time to drain


def config_of(words: list[str]) -> EngineConfig:
    """As the command line makes it."""
    assert words[0] == "serve"
    return engine_config(cli._parser(words).parse_args(words))


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/overlap-spec.yaml").read_text())
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def engine(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return dict(container)


def test_a_pod_has_the_time_that_the_engine_takes_to_drain(pod: dict[str, Any], engine: dict[str, Any]) -> None:
    config = config_of(engine["args"])
    before = float(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= before + config.drain_timeout + STOP_S


def test_probes_ask_what_gives_the_engine_no_work(engine: dict[str, Any]) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = engine[probe]["httpGet"]
        assert asked["path"] in SHALLOW
        assert asked["port"] in {port["name"] for port in engine["ports"]}
    assert {port["containerPort"] for port in engine["ports"]} == {EngineConfig().port}


def test_an_engine_that_hangs_ends_by_itself_before_the_liveness_probe_fails(engine: dict[str, Any]) -> None:
    probe, config = engine["livenessProbe"], config_of(engine["args"])
    assert probe["periodSeconds"] * probe["failureThreshold"] > 5 * config.watchdog_timeout > 0


def test_the_keys_are_where_the_flag_looks(pod: dict[str, Any], engine: dict[str, Any]) -> None:
    (mount,) = [each for each in engine["volumeMounts"] if each["name"] == "keys"]
    assert config_of(engine["args"]).api_key_file == f"{mount['mountPath']}/keys"


def test_what_is_written_is_on_a_volume(engine: dict[str, Any]) -> None:
    """The root is read-only; the image puts all caches into one directory."""
    mounts = {each["mountPath"] for each in engine["volumeMounts"]}
    caches = re.findall(r"(?:OVERLAP_SPEC_CACHE|TRITON_CACHE_DIR|HF_HOME)=(/\w+)/", DOCKERFILE)
    assert caches == ["/cache"] * 3 and {"/cache", "/tmp"} <= mounts
    assert engine["securityContext"]["readOnlyRootFilesystem"]


def test_the_compose_file_starts_what_the_image_has() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    config = config_of(services["engine"]["command"])
    assert float(services["engine"]["stop_grace_period"].rstrip("s")) >= config.drain_timeout + STOP_S
    assert config.host == "0.0.0.0" and services["engine"]["ports"][0].startswith("127.0.0.1:"), "it has no API key"
    stages = set(re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE))
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]
    assert {services["engine"]["build"]["target"], cuda["engine"]["build"]["target"]} == {"cpu", "cuda"} <= stages
    mounted = [volume.partition(":")[0] for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    assert all((DEPLOY / path).exists() for path in mounted if path.startswith("."))


def test_prometheus_scrapes_the_engine_and_grafana_asks_prometheus() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in scraped] == ["overlap-spec"], "the rules ask for it"
    assert scraped[0]["static_configs"][0]["targets"] == [f"engine:{EngineConfig().port}"]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "9090" in services["prometheus"]["ports"][0]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/overlap-spec.yaml").read_text())[
        "providers"
    ]
    assert any(f":{provider['options']['path']}/" in volume for volume in services["grafana"]["volumes"])


def test_the_image_serves_as_it_is_and_ends_on_the_signal_that_drains() -> None:
    command = yaml.safe_load(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    assert config_of(command).host == "0.0.0.0"
    assert "\nSTOPSIGNAL SIGTERM\n" in DOCKERFILE and f"\nEXPOSE {EngineConfig().port}\n" in DOCKERFILE
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE.partition("\nFROM")[2].partition("\nFROM")[0], re.MULTILINE)
    assert {f"!{name}" for line in copied for name in line.split()} == {line for line in ignored if line[:1] == "!"}


@pytest.mark.parametrize(
    "name", ["Dockerfile", "compose.yaml", "compose.cuda.yaml", "kubernetes/overlap-spec.yaml", UNIT.name]
)
def test_what_has_not_been_run_is_said_in_the_first_line(name: str) -> None:
    assert re.match(r"# Never (built|started|applied) where it was written: no \w+", (DEPLOY / name).read_text())


def test_the_unit_starts_the_engine_and_gives_it_time_to_drain() -> None:
    unit = settings_of(UNIT.read_text())
    flags = "--model some/model --host 0.0.0.0"
    words = command_of(unit, {"CREDENTIALS_DIRECTORY": "/run/credentials", "OVERLAP_SPEC_FLAGS": flags})
    config = config_of(words[1:])
    assert (config.model_path, config.api_key_file) == ("some/model", "/run/credentials/keys")
    assert unit["LoadCredential"].startswith("keys:") and unit["EnvironmentFile"].startswith("-"), "flags may be absent"
    assert float(unit["TimeoutStopSec"]) >= config.drain_timeout + STOP_S
    assert unit["KillMode"] == "mixed", "a SIGTERM to each process would end the drain"
    caches = re.findall(r"(\w+)=%C/(\S+?)/", unit["Environment"])
    assert {name for name, _ in caches} == {"OVERLAP_SPEC_CACHE", "HF_HOME", "TRITON_CACHE_DIR"}
    assert {directory for _, directory in caches} == {unit["CacheDirectory"]}, "all else is read-only"


def test_the_unit_starts_again_what_has_failed() -> None:
    unit = settings_of(UNIT.read_text())
    assert not any(is_started_again(unit, status) for status in (0, 2, -15)), "ended, refused, told to end"
    assert all(is_started_again(unit, status) for status in (1, -9, -6)), "failed, killed, crashed"
    tries_s = int(unit["StartLimitBurst"]) * float(unit["RestartSec"])
    assert tries_s < int(unit["StartLimitIntervalSec"]), "one that ends at once, each time, is given up"
    assert unit["OOMPolicy"] == "continue", "the engine starts its own processes again"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze checks the unit, and comes with systemd, which is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/overlap-spec/.venv/bin/overlap-spec", sys.executable))
    done = subprocess.run([tool, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
