"""Resolves --enable-multi-layer-eagle, and targets with several MTP layers without that flag."""

import msgspec

from overlap_spec.config import EngineConfig, ModelFiles, SpecSettings, facts_of
from overlap_spec.config.methods import MTP, PLAIN, methods_where
from overlap_spec.config.resolve.numbers import GIVEN
from overlap_spec.errors import ConfigError

FLAG = "--enable-multi-layer-eagle"


def brings_draft(config: EngineConfig, files: ModelFiles) -> bool:
    """Whether the target's config names MTP layers in its checkpoint.

    Raises: ConfigError if the flag does not fit the number of layers.
    """
    found = _num_layers(files)
    if found > 1 and not config.enable_multi_layer_eagle:
        raise ConfigError(
            "speculative_algorithm",
            f"the target brings {found} MTP layers, one for each guess: add {FLAG}, or name a draft head with"
            " --speculative-draft-model-path",
        )
    if found == 1 and config.enable_multi_layer_eagle:
        raise ConfigError(
            "enable_multi_layer_eagle", "the target brings one MTP layer, which is run for every guess; leave it out"
        )
    return found > 0


def with_layers(spec: SpecSettings, config: EngineConfig, files: ModelFiles) -> SpecSettings:
    """With the flag, give each guess an MTP layer of its own.

    Raises: ConfigError naming the flag that conflicts, or the number of layers.
    """
    if not config.enable_multi_layer_eagle:
        return spec
    if not facts_of(config.speculative_algorithm or PLAIN).uses_own_layer:
        known = methods_where("uses_own_layer")
        raise ConfigError(
            "enable_multi_layer_eagle",
            f"drafts with a checkpoint's own MTP layers: it needs --speculative-algorithm {' or '.join(known)}",
        )
    if spec.topk > 1:
        raise ConfigError("speculative_eagle_topk", f"{FLAG} drafts a chain, a layer for each guess: use 1")
    if spec.token_map is not None:
        raise ConfigError("speculative_token_map", f"is not supported with {FLAG}: leave one of them out")
    num_steps = spec.num_steps
    if spec.draft_path == files.weights and num_steps > (found := _num_layers(files)):
        if spec.numbers_from == GIVEN:
            raise ConfigError(
                "speculative_num_steps",
                f"the target brings {found} MTP layers, one for each draft step of {FLAG}: give at most {found},"
                f" got {num_steps}",
            )
        num_steps = found
    return msgspec.structs.replace(spec, method=MTP, multi_layer=True, num_steps=num_steps, width=num_steps + 1)


def _num_layers(files: ModelFiles) -> int:
    return int(files.config.get("num_nextn_predict_layers") or 0)
