"""When a target's own checkpoint drafts for it: what the flags mean then, and what is refused."""

from typing import Any

import pytest

from overlap_spec.config import EngineConfig, Machine, ModelFiles, SpecSettings
from overlap_spec.config.resolve import resolve, without_speculation
from overlap_spec.errors import ConfigError

NUMBERS = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


def spec_of(num_layers: int | None, **flags: Any) -> SpecSettings:
    config = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": num_layers}
    files = ModelFiles(
        weights="/models/mimo",
        config=config,
        tokenizer_dir=None,
        eos_token_ids=(2,),
        context_length=512,
        vocab_size=128,
    )
    return resolve(EngineConfig(skip_tokenizer_init=True, **flags), files, Machine(2, False))[0].spec


@pytest.mark.parametrize("method", ["EAGLE", "NEXTN"])
def test_without_a_draft_path_the_targets_own_layer_drafts(method: str) -> None:
    spec = spec_of(1, speculative_algorithm=method)
    assert (spec.method, spec.draft_path) == ("NEXTN", "/models/mimo")
    assert (spec.num_steps, spec.topk, spec.width) == (3, 1, 4)
    assert spec.narrower
    spec = spec_of(1, speculative_algorithm=method, speculative_token_map="/map.pt", **NUMBERS)
    assert spec.token_map == "/map.pt" and not spec.narrower


@pytest.mark.parametrize("method", ["EAGLE", "NEXTN"])
def test_a_draft_path_is_what_is_loaded(method: str) -> None:
    spec = spec_of(1, speculative_algorithm=method, speculative_draft_model_path="/heads/a")
    assert (spec.method, spec.draft_path) == (method, "/heads/a")


def test_nothing_drafts_unless_it_is_asked_for() -> None:
    assert spec_of(1).width == 1


@pytest.mark.parametrize("method", ["EAGLE", "EAGLE3", "NEXTN"])
@pytest.mark.parametrize("num_layers", [None, 0])
def test_without_a_layer_a_path_is_needed(method: str, num_layers: int | None) -> None:
    with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
        spec_of(num_layers, speculative_algorithm=method)


@pytest.mark.parametrize("method", ["EAGLE", "NEXTN"])
def test_a_layer_for_each_guess_runs_where_it_is_asked_for(method: str) -> None:
    spec = spec_of(3, speculative_algorithm=method, enable_multi_layer_eagle=True)
    assert (spec.method, spec.draft_path, spec.multi_layer) == ("NEXTN", "/models/mimo", True)
    assert (spec.num_steps, spec.topk, spec.width) == (3, 1, 4)
    spec = spec_of(2, speculative_algorithm=method, enable_multi_layer_eagle=True)
    assert (spec.num_steps, spec.width, spec.narrower) == (2, 3, (1, 2)), "no more guesses than layers by default"
    flags = {"speculative_draft_model_path": "/heads/a", "enable_multi_layer_eagle": True}
    assert spec_of(None, speculative_algorithm=method, **flags).draft_path == "/heads/a"
    assert not spec_of(1, speculative_algorithm=method).multi_layer


LAYERED = {"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}
REFUSED = {
    "several layers without the flag": (
        3,
        {"speculative_algorithm": "NEXTN"},
        "--speculative-algorithm: .*3 MTP .*add",
    ),
    "one layer": (1, LAYERED, "--enable-multi-layer-eagle: .*one MTP layer.*leave it out"),
    "fewer layers than steps": (2, LAYERED | NUMBERS, "--speculative-num-steps: .*2 MTP layers.*at most 2, got 3"),
    "a token map": (3, LAYERED | {"speculative_token_map": "/map.pt"}, "--speculative-token-map: "),
    "no method": (3, {"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle: .*EAGLE or NEXTN"),
    "plain": (3, LAYERED | {"speculative_algorithm": "NONE"}, "--enable-multi-layer-eagle: "),
    "another method": (
        3,
        LAYERED | {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/heads/a"},
        "--enable-multi-layer-eagle: .*EAGLE or NEXTN",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_together_is_refused_by_name(what: str) -> None:
    num_layers, flags, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        spec_of(num_layers, **flags)


def test_plain_decoding_of_the_same_target_has_no_layers() -> None:
    config = EngineConfig(speculative_algorithm="EAGLE", enable_multi_layer_eagle=True)
    assert without_speculation(config) == EngineConfig(speculative_algorithm="NONE")
