"""DFlash checkpoints: the published layout loads, and what disagrees with flags, config or target is named."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny.dflash import MASK, load_tiny_dflash, tiny_dflash
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_target, write_checkpoint

from overlap_spec.config import AcceptSettings, EngineConfig, Machine, ModelFiles, SpecSettings
from overlap_spec.config.resolve import resolve
from overlap_spec.config.speculation import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.dflash import load_dflash
from overlap_spec.models.interfaces import TreeShape
from overlap_spec.models.layers.linear import rows_of
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.targets.llama import layer_parts
from overlap_spec.speculative.methods import method_named
from overlap_spec.worker.startup.memory_budget import Demand, savings

LAYOUT = json.loads((Path(__file__).parents[2] / "data" / "draft_layouts.json").read_text())["DFLASH"]
TARGET = tiny_target(7, layers=3)
LOADED = load_tiny_target(TARGET)
DRAFT = tiny_dflash(8, TARGET, agree=False)


def published() -> TinyCheckpoint:
    """As the table has it: every tensor at random."""
    of_model = {key: DRAFT.config[key] for key in LAYOUT["config_of_a_model"]}
    own = dict(zip(LAYOUT["dflash_config"], (MASK, [0, 1]), strict=True))
    config: dict[str, Any] = {**LAYOUT["config"], **of_model, "dflash_config": own}
    sizes = {
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
        "D": config["head_dim"],
        "A": config["hidden_size"] * len(own["target_layer_ids"]),
    }
    layers = range(config["num_hidden_layers"])
    shapes = LAYOUT["tensors"] | {
        name.format(layer): shape for layer in layers for name, shape in LAYOUT["tensors_of_a_layer"].items()
    }
    random = torch.Generator().manual_seed(1)
    return TinyCheckpoint(
        config,
        {name: torch.randn([sizes[size] for size in shape], generator=random) for name, shape in shapes.items()},
    )


def loaded_from(directory: Path, checkpoint: TinyCheckpoint, num_rows: int = 8) -> Any:
    path = str(write_checkpoint(directory, checkpoint))
    return load_dflash(DraftSource.for_target(path, LOADED), LOADED, num_rows)


def test_the_published_layout_loads(tmp_path: Path) -> None:
    checkpoint = published()
    draft = loaded_from(tmp_path, checkpoint, 16)
    assert (draft.aux_layers, draft.mask_token, draft.num_rows, len(draft.layers)) == ((0, 1), MASK, 16, 2)
    assert draft_kind({name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}) is DraftKind.DFLASH
    assert draft.num_bytes == sum(8 * tensor.numel() for tensor in checkpoint.tensors.values()) + 8 * LOADED.vocab_size
    assert draft.profile.scratch_rows == draft.profile.step_rows == 16
    assert set(checkpoint.tensors) == set(DRAFT.tensors), "the tiny drafts of other tests have it too"


def in_speculators(checkpoint: TinyCheckpoint, **changes: Any) -> TinyCheckpoint:
    """The same as the table has it: the layers' numbers are one level down, and other numbers name the target's."""
    layout, own = LAYOUT["in_speculators"], checkpoint.config["dflash_config"]
    layers = {name: checkpoint.config[name] for name in checkpoint.config if name not in layout["leave_out"]}
    config = layout["config"] | {
        "transformer_layer_config": layers,
        "draft_vocab_size": layers["vocab_size"],
        "block_size": checkpoint.config["block_size"],
        "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
    }
    assert set(config) == {*layout["config"], *layout["config_of_a_model"]}
    return TinyCheckpoint(config | changes, checkpoint.tensors)


def test_a_draft_of_speculators_is_that_of_z_lab(tmp_path: Path) -> None:
    """Its tensors have the same names."""
    one = loaded_from(tmp_path / "one", published(), 16)
    other = loaded_from(tmp_path / "other", in_speculators(published()), 16)
    assert (one.aux_layers, one.mask_token) == (other.aux_layers, other.mask_token) == ((0, 1), MASK)
    for layers in zip(one.layers, other.layers, strict=True):
        first, second = map(layer_parts, layers)
        assert all(torch.equal(rows_of(*place), rows_of(*second[name])) for name, place in first.items())
        assert len(first) == 11 and layers[0].attention.shape == layers[1].attention.shape


NOT_COMPUTED: dict[str, dict[str, Any]] = {
    "sample_from_anchor: found True, expected False": {"sample_from_anchor": True},
    "projector_type: found 'domino', expected 'dflash'": {"projector_type": "domino"},
    "draft_vocab_size: found 64, expected 128, all tokens": {"draft_vocab_size": 64},
    "target_layer_ids: found [], expected ascending layers of the target": {"aux_hidden_state_layer_ids": None},
}


@pytest.mark.parametrize("message", NOT_COMPUTED)
def test_what_a_draft_of_speculators_has_beside_is_named(message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        loaded_from(tmp_path, in_speculators(published(), **NOT_COMPUTED[message]))


OWN = DRAFT.config["dflash_config"]
BAD_CONFIGS = {
    "block_size: found 1, expected 2: a root and at least one mask": {"block_size": 1},
    "block_size: found '8', expected 2": {"block_size": "8"},
    "mask_token_id: found None, expected 0 to 127": {"dflash_config": {"target_layer_ids": [0, 1]}},
    "mask_token_id: found 128, expected 0 to 127": {"dflash_config": OWN | {"mask_token_id": 128}},
    "target_layer_ids: found [0, 3], expected ascending layers of the target, 0 to 2": {
        "dflash_config": OWN | {"target_layer_ids": [0, 3]}
    },
    "target_layer_ids: found [1, 0], expected ascending": {"dflash_config": OWN | {"target_layer_ids": [1, 0]}},
    "target_layer_ids: found None, expected ascending": {"dflash_config": {"mask_token_id": 1}},
    "num_target_layers: found 4, expected 3, the target's": {"num_target_layers": 4},
    "hidden_size: found 64, expected 32, the target's": {"hidden_size": 64},
    "vocab_size: found 127, expected 128, the target's": {"vocab_size": 127},
    "layer_types: found ['full_attention', 'sliding_attention'], expected full_attention in every layer": {
        "layer_types": ["full_attention", "sliding_attention"]
    },
    "is_causal: found True": {"is_causal": True},
    "final_logit_softcapping: found 30.0, which is not supported": {"final_logit_softcapping": 30.0},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_a_config_that_disagrees_is_named(message: str) -> None:
    bad = replace(DRAFT, config=DRAFT.config | BAD_CONFIGS[message])
    with pytest.raises(CheckpointError, match="memory/config.json: .*" + re.escape(message)):
        load_tiny_dflash(bad, LOADED, 8)


def test_tensors_that_disagree_are_named(tmp_path: Path) -> None:
    three = DRAFT.config | {"dflash_config": OWN | {"target_layer_ids": [0, 1, 2]}}
    with pytest.raises(CheckpointError, match=r"fc.weight: found shape \[32, 64\], expected \[32, 96\]"):
        load_tiny_dflash(replace(DRAFT, config=three), LOADED, 8)
    fewer = {name: tensor for name, tensor in DRAFT.tensors.items() if name != "layers.1.self_attn.k_norm.weight"}
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_norm\.weight"):
        load_tiny_dflash(replace(DRAFT, tensors=fewer), LOADED, 8)
    more = DRAFT.tensors | {"markov_head.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="markov_head.weight"):
        load_tiny_dflash(replace(DRAFT, tensors=more), LOADED, 8)
    with pytest.raises(ConfigError, match="--speculative-dflash-block-size: .*trained on blocks of 16, got 17"):
        loaded_from(tmp_path, DRAFT, 17)


def test_the_embeddings_scale_is_the_drafts_own() -> None:
    """A target's own scale is not the draft's: the published code reads the target's rows as they are stored."""
    scaled = replace(DRAFT, config=DRAFT.config | {"input_embedding_scale": 3.0})
    assert load_tiny_dflash(scaled, LOADED, 8).embedding.scale == 3.0
    target = replace(LOADED, embedding=LOADED.embedding.scaled(7.0))
    assert load_tiny_dflash(DRAFT, target, 8).embedding.scale == 1.0


FILES = ModelFiles(
    weights="target", config=TARGET.config, tokenizer_dir=None, eos_token_ids=(2,), context_length=512, vocab_size=128
)


def settings_of(**flags: Any) -> Any:
    given = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "draft", "device": "cpu"} | flags
    return resolve(EngineConfig(model_path="target", **given), FILES, Machine(2, False))[0].spec


def test_a_block_is_the_window() -> None:
    given = settings_of(speculative_dflash_block_size=16)
    assert (given.num_steps, given.topk, given.width, given.narrower) == (15, 1, 16, ())
    found = settings_of()
    assert (found.num_steps, found.topk, found.width) == (7, 1, 8) and found.narrower[:2] == (1, 2)
    same = settings_of(speculative_dflash_block_size=5, speculative_num_draft_tokens=5)
    assert (same.num_steps, same.width) == (4, 5)


def test_a_tree_has_the_levels_of_a_block_and_a_window_of_its_own() -> None:
    """Every node of a level has children, so it can have more nodes than a tree that grows level by level."""
    given = settings_of(speculative_dflash_block_size=16, speculative_eagle_topk=4, speculative_num_draft_tokens=64)
    assert (given.num_steps, given.topk, given.width, given.narrower) == (15, 4, 64, ())
    small = settings_of(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=20)
    assert (small.num_steps, small.topk, small.width) == (3, 2, 15), "1 + 2 + 4 + 8"


def test_a_trees_block_has_a_row_for_each_level(tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path, DRAFT))
    tree = SpecSettings("DFLASH", path, 5, 4, 12, accept=AcceptSettings())
    profile = method_named("DFLASH").load(tree, LOADED, lambda *_: None).profile
    assert (profile.scratch_rows, profile.step_rows, profile.draft_vocab_size) == (6, 6, 0)
    assert profile.tree == TreeShape(5, 0, 5)


def test_a_tree_that_saves_memory_has_fewer_nodes() -> None:
    """Its block stays as it is."""
    numbers = dict.fromkeys(("target_weights", "draft_weights", "target_kv", "vocab_size", "hidden_size", "chunk"), 0)
    sizes = {"width": 32, "scratch_rows": 8, "level_rows": 8, "block_flag": "-x", "is_tree": True}
    demand = Demand(**numbers, draft_kv=1000, itemsize=4, max_running_requests=8, column_bytes=100, **sizes)
    saved = {saving.flag: saving.num_bytes for saving in savings(demand)}
    assert saved["--speculative-num-draft-tokens 16"] == 9 * 16 * 100
    assert not any(flag.startswith(("-x", "--speculative-eagle-topk")) for flag in saved)


BAD_FLAGS: dict[str, dict[str, Any]] = {
    "--speculative-dflash-block-size: EAGLE3 guesses no blocks: .*DFLASH": {
        "speculative_algorithm": "EAGLE3",
        "speculative_dflash_block_size": 8,
    },
    "--speculative-dflash-block-size: NGRAM guesses no blocks": {
        "speculative_algorithm": "NGRAM",
        "speculative_draft_model_path": None,
        "speculative_dflash_block_size": 8,
    },
    "--speculative-algorithm: missing": {
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "speculative_dflash_block_size": 8,
    },
    "--speculative-num-draft-tokens: a chain of --speculative-dflash-block-size 8 has 8": {
        "speculative_dflash_block_size": 8,
        "speculative_num_draft_tokens": 7,
    },
    "--speculative-num-draft-tokens: give .* together": {
        "speculative_dflash_block_size": 8,
        "speculative_eagle_topk": 2,
    },
    "--speculative-num-steps: a tree of --speculative-dflash-block-size 8 has 7": {
        "speculative_dflash_block_size": 8,
        "speculative_num_steps": 6,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 9,
    },
    "--speculative-num-draft-tokens: a tree has at most 64 nodes, root included, got 65": {
        "speculative_dflash_block_size": 8,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 65,
    },
    "--speculative-use-rejection-sampling: judges chains: use --speculative-eagle-topk 1": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 4,
        "speculative_use_rejection_sampling": True,
    },
    "--speculative-draft-model-path: DFLASH needs a draft model": {"speculative_draft_model_path": None},
}


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_flags_that_do_not_go_together_are_refused_by_name(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(**BAD_FLAGS[message])
