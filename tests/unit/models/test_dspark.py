"""DSpark checkpoints: both published layouts load, and what disagrees with flags, config or target is named."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny.dflash import MASK
from support.tiny.dspark import load_tiny_dspark, tiny_dspark
from support.tiny.models import TinyCheckpoint, _open, load_tiny_target, tiny_target, write_checkpoint

from overlap_spec.config import EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.config.speculation import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.dspark import DSparkConfig, load_dspark, load_weights
from overlap_spec.models.loading.parts import canonical_name
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.worker.startup.memory_budget import Demand, savings

LAYOUTS = json.loads((Path(__file__).parents[2] / "data" / "draft_layouts.json").read_text())
LAYOUT = LAYOUTS["DSPARK"]
TARGET = tiny_target(7, layers=3)
LOADED = load_tiny_target(TARGET)
DRAFT = tiny_dspark(8, TARGET, agree=False)
RANK = DRAFT.config["markov_rank"]


def published(kind: str, in_specforge: bool) -> TinyCheckpoint:
    """As the table has it: every tensor at random."""
    of_model = {key: DRAFT.config[key] for key in LAYOUTS["DFLASH"]["config_of_a_model"]}
    own = dict(zip(LAYOUT["config_of_a_draft"], (kind, RANK, MASK, [0, 1]), strict=True))
    config: dict[str, Any] = {**LAYOUT["config"], **of_model, **own}
    sizes = {
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
        "D": config["head_dim"],
        "A": config["hidden_size"] * 2,
        "V": config["vocab_size"],
        **{"r": RANK, "3r": 3 * RANK, "H+r": config["hidden_size"] + RANK, "H+2r": config["hidden_size"] + 2 * RANK},
        "1": 1,
    }
    layers = range(config["num_hidden_layers"])
    shapes = LAYOUT["tensors"] | LAYOUT["tensors_of_a_type"][kind]
    of_layer = LAYOUTS["DFLASH"]["tensors_of_a_layer"]
    shapes |= {name.format(layer): shape for layer in layers for name, shape in of_layer.items()}
    if in_specforge:
        shapes = {name: shape for name, shape in shapes.items() if name not in LAYOUT["not_in_specforge"]}
        theirs = LAYOUT["in_specforge"]
        nested = {key: config.pop(key) for key in theirs["dflash_config"] if key in config}
        config |= {"architectures": theirs["architectures"], "dflash_config": nested}
    random = torch.Generator().manual_seed(1)
    return TinyCheckpoint(
        config,
        {name: torch.randn([sizes[size] for size in shape], generator=random) for name, shape in shapes.items()},
    )


def loaded_from(directory: Path, checkpoint: TinyCheckpoint, num_rows: int = 7) -> Any:
    path = str(write_checkpoint(directory, checkpoint))
    return load_dspark(DraftSource.for_target(path, LOADED), LOADED, num_rows)


@pytest.mark.parametrize("in_specforge", [False, True])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_published_layouts_load(kind: str, in_specforge: bool, tmp_path: Path) -> None:
    checkpoint = published(kind, in_specforge)
    draft = loaded_from(tmp_path, checkpoint)
    backbone, profile = draft.backbone, draft.profile
    assert (backbone.aux_layers, backbone.mask_token, backbone.num_rows) == ((0, 1), MASK, 7)
    assert draft_kind({name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}) is DraftKind.DSPARK
    unread = ("embed_tokens", "lm_head", "confidence_head")  # the target's own, and what no block needs
    read = [tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(unread)]
    assert profile.num_bytes == 8 * (sum(tensor.numel() for tensor in read) + LOADED.vocab_size)
    assert profile.scratch_rows == profile.step_rows == 7
    assert type(draft.markov).__name__.lower().startswith(kind)


def test_work_counts_the_bias_once_for_each_guess(tmp_path: Path) -> None:
    draft = loaded_from(tmp_path, published("vanilla", False))
    work, without = draft.profile.work, draft.backbone.profile.work
    assert work.weight_bytes - without.weight_bytes == 7 * LOADED.vocab_size * RANK * 8
    assert work.row_flop - without.row_flop == 2 * LOADED.vocab_size * RANK


def test_a_token_map_takes_rows_of_the_bias_too() -> None:
    """FR-Spec: the logits of the tokens in the map are those that the whole draft has for them."""
    ids = torch.tensor([90, 3, 17, 64])
    config, like = DSparkConfig.from_hf(DRAFT.config, "memory/config.json", LOADED), LOADED.embedding
    opened = _open(DRAFT, canonical_name, like.dtype, like.device)
    mapped, whole = load_weights(config, opened, LOADED, 7, ids), load_tiny_dspark(DRAFT, LOADED, 7)
    random = torch.Generator().manual_seed(2)
    latent, previous = torch.randn(3, RANK, generator=random, dtype=torch.float64), torch.tensor([1, 100, 5])
    assert mapped.backbone.target_ids.tolist() == ids.tolist()
    torch.testing.assert_close(mapped.markov.bias.logits(latent), whole.markov.bias.logits(latent)[:, ids])
    assert torch.equal(mapped.markov.step(previous, latent, None)[0], whole.markov.step(previous, latent, None)[0])


BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "markov_rank: found 0, expected at least 1": {"markov_rank": 0},
    "markov_rank: found None, expected at least 1": {"markov_rank": None},
    "markov_head_type: found 'gru', expected one of vanilla, gated, rnn": {"markov_head_type": "gru"},
    "speculators_model_type: found 'dspark', expected DeepSpec's or SpecForge's layout": {
        "speculators_model_type": "dspark"
    },
    "architectures: found 'Gemma4DSparkModel', expected Qwen3DSparkModel or DSparkDraftModel": {
        "architectures": ["Gemma4DSparkModel"]
    },
    "target_layer_ids: found [-1, 1], expected ascending layers of the target, 0 to 2": {"target_layer_ids": [-1, 1]},
    "mask_token_id: found None, expected 0 to 127": {"mask_token_id": None},
    "block_size: found 1, expected 2": {"block_size": 1},
    "num_target_layers: found 4, expected 3, the target's": {"num_target_layers": 4},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_a_config_that_disagrees_is_named(message: str) -> None:
    bad = replace(DRAFT, config=DRAFT.config | BAD_CONFIGS[message])
    with pytest.raises(CheckpointError, match="memory/config.json: .*" + re.escape(message)):
        load_tiny_dspark(bad, LOADED, 7)


def test_tensors_that_disagree_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"markov_w1.weight: found shape \[128, 8\], expected \[128, 9\]"):
        load_tiny_dspark(replace(DRAFT, config=DRAFT.config | {"markov_rank": 9}), LOADED, 7)
    alone = DRAFT.config | {"confidence_head_with_markov": False}
    with pytest.raises(
        CheckpointError, match=r"confidence_head.proj.weight: found shape \[1, 40\], expected \[1, 32\]"
    ):
        load_tiny_dspark(replace(DRAFT, config=alone), LOADED, 7)
    with pytest.raises(CheckpointError, match=r"confidence_head"):
        load_tiny_dspark(replace(DRAFT, config=DRAFT.config | {"enable_confidence_head": False}), LOADED, 7)
    with pytest.raises(CheckpointError, match=r"markov_head\.gate_proj\.weight"):
        load_tiny_dspark(replace(DRAFT, config=DRAFT.config | {"markov_head_type": "gated"}), LOADED, 7)
    with pytest.raises(ConfigError, match="--speculative-dspark-block-size: .*trained on blocks of 7, got 8"):
        loaded_from(tmp_path, replace(DRAFT, config=DRAFT.config | {"block_size": 7}), 8)


FILES = ModelFiles(
    weights="target", config=TARGET.config, tokenizer_dir=None, eos_token_ids=(2,), context_length=512, vocab_size=128
)


def settings_of(**flags: Any) -> Any:
    given = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "draft", "device": "cpu"} | flags
    return resolve(EngineConfig(model_path="target", **given), FILES, Machine(2, False))[0].spec


def test_the_window_is_one_wider_than_a_block() -> None:
    given = settings_of(speculative_dspark_block_size=15)
    assert (given.num_steps, given.topk, given.width, given.narrower) == (15, 1, 16, ())
    found = settings_of()
    assert (found.num_steps, found.topk, found.width) == (7, 1, 8) and found.narrower[:2] == (1, 2)
    same = settings_of(speculative_dspark_block_size=4, speculative_num_draft_tokens=5)
    assert (same.num_steps, same.width) == (4, 5)


BAD_FLAGS: dict[str, dict[str, Any]] = {
    "--speculative-dspark-block-size: DFLASH takes --speculative-dflash-block-size: .*DSPARK": {
        "speculative_algorithm": "DFLASH",
        "speculative_dspark_block_size": 4,
    },
    "--speculative-dflash-block-size: DSPARK takes --speculative-dspark-block-size: .*DFLASH": {
        "speculative_dflash_block_size": 8
    },
    "--speculative-dspark-block-size: EAGLE3 guesses no blocks: .*DSPARK": {
        "speculative_algorithm": "EAGLE3",
        "speculative_dspark_block_size": 4,
    },
    "--speculative-num-draft-tokens: a chain of --speculative-dspark-block-size 8 has 9": {
        "speculative_dspark_block_size": 8,
        "speculative_num_draft_tokens": 8,
    },
    "--speculative-eagle-topk: DSPARK guesses chains: use 1": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 4,
    },
    "--speculative-draft-model-path: DSPARK needs a draft model": {"speculative_draft_model_path": None},
}


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_flags_that_do_not_go_together_are_refused_by_name(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(**BAD_FLAGS[message])


def test_a_block_that_saves_memory_is_one_less_than_its_window() -> None:
    numbers = dict.fromkeys(("target_weights", "draft_weights", "target_kv", "vocab_size", "hidden_size", "chunk"), 0)
    demand = Demand(
        **numbers, draft_kv=1000, itemsize=4, max_running_requests=8, width=8, scratch_rows=7, block_flag="-x"
    )
    saved = {saving.flag: saving.num_bytes for saving in savings(demand)}
    assert saved["-x 3"] >= 9 * 4 * 1000
