"""When a target's own checkpoint drafts for it: what the flags mean then, and what is refused."""

from typing import Any

import pytest

from overlap_spec.config import EngineConfig, Machine, ModelFiles, SpecSettings
from overlap_spec.errors import ConfigError
from overlap_spec.resolve import resolve

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


def test_a_layer_for_each_guess_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--speculative-algorithm: .*3 MTP layers.*--enable-multi-layer-eagle"):
        spec_of(3, speculative_algorithm="NEXTN")
