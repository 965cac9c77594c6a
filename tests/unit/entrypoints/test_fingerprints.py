"""With --enable-deterministic-inference `/server_info` has what bits depend on, and replies its fingerprint."""

import json

import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, ask, events_of
from support.fake_facts import fake_facts
from support.fake_settings import fake_settings

from overlap_spec.config import EngineConfig
from overlap_spec.entrypoints.http.engine_client import ServerInfo, server_info

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}]},
    "/v1/completions": {"prompt": "a"},
}
NAMED = replace(INFO, fingerprint="bits-1")


def of(device: str = "a card", model: str = "/a", deterministic: bool = True, dtype: str = "bfloat16") -> ServerInfo:
    settings, facts = fake_settings(), fake_facts()
    settings = replace(settings, model=replace(settings.model, deterministic=deterministic, dtype=dtype))
    facts = replace(facts, worker=replace(facts.worker, device=device))
    return server_info(EngineConfig(model_path=model), settings, lambda: facts)


def test_the_contract_names_weights_format_kernels_and_card() -> None:
    found = of()
    contract = found.settings["bits_depend_on"]
    assert (contract["dtype"], contract["device"]) == ("bfloat16", "a card") and "/a" in contract["weights"]
    assert len(contract["kernels"]) == 16 and contract["torch"]
    others = {of("another").fingerprint, of(model="/b").fingerprint, of(dtype="float16").fingerprint}
    assert of().fingerprint == found.fingerprint and len({found.fingerprint, *others}) == 4
    without = of(deterministic=False)
    assert "bits_depend_on" not in without.settings and without.fingerprint != found.fingerprint


@pytest.mark.parametrize("path", BODIES)
def test_replies_have_it(path: str) -> None:
    assert ask(FakeClient(), "POST", path, NAMED, json=BODIES[path]).json()["system_fingerprint"] == "bits-1"
    asked = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
    *events, _ = events_of(ask(FakeClient(), "POST", path, NAMED, json=asked))
    assert len(events) > 1 and {json.loads(event)["system_fingerprint"] for event in events} == {"bits-1"}
    assert "system_fingerprint" not in ask(FakeClient(), "POST", path, json=BODIES[path]).json()
