"""What training writes: the layouts that engines load, and files that a full disk cannot take away."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_target
from torch import Tensor

import overlap_spec
from overlap_spec.config.speculation import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.dflash import load_dflash
from overlap_spec.models.drafts.dspark import load_dspark
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.train_draft import state
from overlap_spec.train_draft.dflash import DFlash, DSpark
from overlap_spec.train_draft.eagle3 import Eagle3, read_head
from overlap_spec.train_draft.head import Frozen, Head
from overlap_spec.train_draft.samples import Sample
from overlap_spec.train_draft.state import aux_layers_of, draft_numbers

SHIPPED = Path(overlap_spec.__file__).parent / "data" / "smollm2" / "eagle3"
LAYOUTS = json.loads((Path(__file__).parents[2] / "data" / "draft_layouts.json").read_text())
TARGET = tiny_target(7, layers=8)
LOADED = load_tiny_target(TARGET)
IDS = torch.tensor([1, 2, 5, *range(40, 120)])


def frozen_of(target: TinyCheckpoint = TARGET) -> Frozen:
    return Frozen(LOADED, *draft_numbers(target.config, "config.json"), 32)


def eagle3() -> Eagle3:
    return Eagle3(frozen_of(), aux_layers_of(8, DraftKind.EAGLE_3), IDS)


def dflash() -> DFlash:
    return DFlash(frozen_of(), aux_layers_of(8, DraftKind.DFLASH, 3), 8, 5)


def write(directory: Path, head: Head) -> None:
    state.write_draft(directory, head.tensors | head.buffers, head.config())


def stored(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = load_file(directory / "model.safetensors")
    return json.loads((directory / "config.json").read_text()), tensors


def sizes_of(config: dict[str, Any], num_aux: int) -> dict[str, int]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    return {
        "H": hidden,
        "2H": 2 * hidden,
        "I": config["intermediate_size"],
        "Q": config["num_attention_heads"] * dim,
        "K": config["num_key_value_heads"] * dim,
        "D": dim,
        "A": hidden * num_aux,
        "V": config["vocab_size"],
        "Vd": config.get("draft_vocab_size", 0),
    }


def shapes_of(layout: dict[str, Any], sizes: dict[str, int], num_layers: int) -> dict[str, tuple[int, ...]]:
    """A table's tensors in numbers."""
    named = layout["tensors"] | {
        name.format(layer): shape
        for layer in range(num_layers)
        for name, shape in layout.get("tensors_of_a_layer", {}).items()
    }
    return {name: tuple(sizes[size] for size in shape) for name, shape in named.items()}


def shipped() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    _, tensors = stored(SHIPPED)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def test_an_eagle3_head_has_specforges_layout(tmp_path: Path) -> None:
    head = eagle3()
    write(tmp_path, head)
    config, tensors = stored(tmp_path)
    layout = LAYOUTS["EAGLE3"]
    expected = shapes_of(layout, sizes_of(config, 3), 0)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    of_shipped = shipped()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {name: of_shipped[name][1] for name in expected}
    config_shipped = json.loads((SHIPPED / "config.json").read_text())
    assert {name: shape for name, (shape, _) in of_shipped.items()} == shapes_of(layout, sizes_of(config_shipped, 3), 0)
    assert config | layout["config"] == config and set(layout["config_of_a_model"]) <= set(config)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert draft_kind(expected) is DraftKind.EAGLE_3
    loaded = load_eagle3(DraftSource.for_target(str(tmp_path), LOADED), LOADED)
    assert loaded.profile.aux_layers == (1, 3, 4)
    assert loaded.target_ids.tolist() == IDS.tolist()  # type: ignore[attr-defined]  # of EAGLE-3
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == IDS.tolist()


def test_a_head_is_read_as_it_was_written(tmp_path: Path) -> None:
    """To be trained further; one with a tensor that would not be is refused."""
    head = eagle3()
    write(tmp_path, head)
    source = DraftSource.for_target(str(tmp_path), LOADED)
    found = read_head(source, LOADED, "speculative_draft_model_path")
    assert found["aux_layers"] == (1, 3, 4) and found["ids"].tolist() == IDS.tolist()
    again = Eagle3(frozen_of(), found["aux_layers"], found["ids"], found["tensors"])
    assert again.tensors.keys() == head.tensors.keys()
    for name, tensor in head.tensors.items():
        torch.testing.assert_close(again.tensors[name].detach(), tensor.detach().bfloat16().float(), msg=name)
    _, tensors = stored(tmp_path)
    save_file(tensors | {"fc.bias": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"fc\.weight in few bits or with a bias cannot be trained"):
        read_head(source, LOADED, "speculative_draft_model_path")


def test_a_dflash_draft_has_specforges_layout(tmp_path: Path) -> None:
    write(tmp_path, dflash())
    config, tensors = stored(tmp_path)
    layout = LAYOUTS["DFLASH"]
    expected = shapes_of(layout, sizes_of(config, len(config["dflash_config"]["target_layer_ids"])), 3)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    same = {key: value for key, value in layout["config"].items() if key not in ("block_size", "layer_types")}
    assert config | {key: value for key, value in same.items() if value is not None} == config
    assert set(layout["config_of_a_model"]) <= set(config) and set(layout["dflash_config"]) <= set(
        config["dflash_config"]
    )
    loaded = load_dflash(DraftSource.for_target(str(tmp_path), LOADED), LOADED, 8)
    assert (loaded.aux_layers, loaded.mask_token, len(loaded.layers)) == ((1, 3, 5), 5, 3)


def test_a_dspark_draft_has_specforges_layout(tmp_path: Path) -> None:
    write(tmp_path, DSpark(frozen_of(), aux_layers_of(8, DraftKind.DSPARK, 3), 7, 5))
    config, tensors = stored(tmp_path)
    layout, own = LAYOUTS["DSPARK"], config["dflash_config"]
    named = {name: shape for name, shape in layout["tensors"].items() if name not in layout["not_in_specforge"]}
    of_layers = layout | {"tensors": named, "tensors_of_a_layer": LAYOUTS["DFLASH"]["tensors_of_a_layer"]}
    rank = own["markov_rank"]
    sizes = sizes_of(config, len(own["target_layer_ids"])) | {"r": rank, "H+r": config["hidden_size"] + rank, "1": 1}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes_of(of_layers, sizes, 3)
    assert config["architectures"] == layout["in_specforge"]["architectures"]
    assert set(layout["in_specforge"]["dflash_config"]) - {"attention_mode"} == set(own)
    given = {key: value for key, value in layout["config"].items() if key in config and value is not None}
    other = ("architectures", "layer_types")
    assert {key: config[key] for key in given if key not in other} == {
        key: value for key, value in given.items() if key not in other
    }
    loaded = load_dspark(DraftSource.for_target(str(tmp_path), LOADED), LOADED, 7)
    assert (loaded.backbone.aux_layers, loaded.backbone.mask_token, loaded.backbone.num_rows) == ((1, 3, 5), 5, 7)
    assert type(loaded.markov).__name__ == "VanillaMarkov"


def test_a_head_begins_with_the_targets_last_layer() -> None:
    head, weights = eagle3(), TARGET.tensors
    name = "self_attn.q_proj.weight"
    torch.testing.assert_close(head.tensors[f"midlayer.{name}"][:, 32:].double(), weights[f"model.layers.7.{name}"])
    torch.testing.assert_close(head.tensors["lm_head.weight"].double(), weights["lm_head.weight"][IDS])
    torch.testing.assert_close(head.tensors["norm.weight"].double(), weights["model.norm.weight"])
    torch.testing.assert_close(
        dflash().tensors["layers.0.mlp.down_proj.weight"].double(), weights["model.layers.5.mlp.down_proj.weight"]
    )
    torch.testing.assert_close(LOADED.head.matrix(), weights["lm_head.weight"])


def test_a_head_has_no_memory_of_its_target() -> None:
    """In float32, in which it is trained, its parameters would be the target's where they begin as they are."""
    target = load_tiny_target(TARGET, torch.float32)
    frozen = Frozen(target, *draft_numbers(TARGET.config, "config.json"), 32)
    for head in (Eagle3(frozen, (1, 3, 4), IDS), DFlash(frozen, (1, 3, 5), 8, 5)):
        for tensor in head.tensors.values():
            tensor.data.fill_(3.0)
    torch.testing.assert_close(frozen.final_norm, TARGET.tensors["model.norm.weight"].float())
    torch.testing.assert_close(target.head.matrix(), TARGET.tensors["lm_head.weight"].float())


def test_a_block_begins_with_context_as_the_targets_layers_read_it() -> None:
    """Its norm is that of their inputs, and heads are as large as theirs: of rows drawn at random, or by norms."""
    head, weights = dflash(), TARGET.tensors
    norms = torch.stack([weights[f"model.layers.{layer}.input_layernorm.weight"] for layer in (5, 6, 7)])
    torch.testing.assert_close(head.tensors["hidden_norm.weight"].double(), norms.double().mean(0))
    rows = torch.randn(4000, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for part in "qk":
        made = rows * norms[1] @ weights[f"model.layers.6.self_attn.{part}_proj.weight"].T
        size = head.tensors[f"layers.1.self_attn.{part}_norm.weight"]
        torch.testing.assert_close(size.double(), made.square().mean().sqrt().expand(len(size)), rtol=0.02, atol=0)
    with_norms = tiny_target(7, layers=3, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    loaded = load_tiny_target(with_norms)
    frozen = Frozen(loaded, *draft_numbers(with_norms.config, ""), 32)
    of_heads = DFlash(frozen, aux_layers_of(3, DraftKind.DFLASH, 2), 8, 5).tensors
    name = "self_attn.k_norm.weight"
    torch.testing.assert_close(of_heads[f"layers.1.{name}"].double(), with_norms.tensors[f"model.layers.2.{name}"])


@pytest.mark.parametrize(
    ("layers", "expected"), [(30, (1, 14, 26)), (8, (1, 3, 4)), (4, (0, 1, 3)), (2, (0, 1)), (1, (0,))]
)
def test_eagle3_reads_the_layers_that_sglang_reads(layers: int, expected: tuple[int, ...]) -> None:
    assert aux_layers_of(layers, DraftKind.EAGLE_3) == expected


@pytest.mark.parametrize(("layers", "expected"), [(36, (1, 9, 17, 25, 33)), (6, (0, 1, 2, 4, 5)), (3, (0, 1, 2))])
def test_dflash_reads_layers_that_are_spread(layers: int, expected: tuple[int, ...]) -> None:
    """Those of 36 layers are in z-lab's and SpecForge's config of Qwen3-8B."""
    assert aux_layers_of(layers, DraftKind.DFLASH, 5) == expected


@pytest.mark.parametrize("multimodal", [False, True])
def test_a_target_without_a_layer_like_a_drafts_is_named(multimodal: bool) -> None:
    text = TARGET.config | {"kv_lora_rank": 512}
    with pytest.raises(CheckpointError, match=r"config.json: kv_lora_rank: found 512, expected attention with keys"):
        draft_numbers({"text_config": text} if multimodal else text, "config.json")


def samples(count: int) -> list[Sample]:
    return [Sample(torch.arange(10 + n, dtype=torch.int32), 3 + n) for n in range(count)]


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    state.check_output(tmp_path, resume=False)
    state.write_answers(tmp_path, {"num_asked": 5, "method": "EAGLE3"}, samples(4), samples(1))
    num_asked, (found, held_out) = state.read_answers(tmp_path, {"method": "EAGLE3"})
    assert num_asked == 5 and len(held_out) == 1
    assert [(each.tokens.tolist(), each.start) for each in found] == [([*range(10 + n)], 3 + n) for n in range(4)]
    assert state.read_training(tmp_path) == {}
    with pytest.raises(ConfigError, match="--resume: .*method: found EAGLE3, and now it is DFLASH"):
        state.read_answers(tmp_path, {"method": "DFLASH"})


def test_nothing_is_overwritten_by_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume: .*has no resume/answers.pt"):
        state.check_output(tmp_path / "new", resume=True)
    state.check_output(tmp_path, resume=False)
    write(tmp_path, eagle3())
    with pytest.raises(ConfigError, match="--output: .*has a draft already; give --resume"):
        state.check_output(tmp_path, resume=False)
    with pytest.raises(ConfigError, match="--output: .*is a file"):
        state.check_output(tmp_path / "config.json", resume=False)
    (tmp_path / "resume" / "answers.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"resume/answers\.pt: not a torch file of plain tables"):
        state.read_answers(tmp_path, {})


def test_a_full_disk_is_named_and_takes_nothing(tmp_path: Path) -> None:
    head = eagle3()
    write(tmp_path, head)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        head.tensors["fc.weight"].zero_()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match=f"--output: .*model.safetensors: {os.strerror(errno.EFBIG)}.*still there"
        ):
            write(tmp_path, head)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_disk_with_too_little_room_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.check_space(tmp_path, eagle3())
    monkeypatch.setattr(state, "MIB", 1 << 60)
    with pytest.raises(ConfigError, match="--output: .*the disk has 0 MiB left, 1 MiB are needed"):
        state.check_space(tmp_path, eagle3())
