"""P-EAGLE heads: the published layout loads, and what disagrees with flags, config or target is named."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.peagle import MASK, load_tiny_peagle, tiny_peagle

from overlap_spec.config import AcceptSettings, EngineConfig, Machine, SpecSettings
from overlap_spec.config.resolve import resolve
from overlap_spec.config.resolve.numbers import GIVEN
from overlap_spec.config.speculation import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_drafting, resolve_model
from overlap_spec.models.drafts.eagle3 import MASK_KEYS, tensor_places
from overlap_spec.models.interfaces import TargetOutput, TreeShape
from overlap_spec.models.layers.linear import rows_of
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.speculative.drafts import ChainDraft
from overlap_spec.speculative.methods import method_named
from overlap_spec.speculative.proposers.parallel import ParallelDraft

LAYOUTS = json.loads((Path(__file__).parents[2] / "data" / "draft_layouts.json").read_text())
LAYOUT = LAYOUTS["P-EAGLE"]
TARGET = tiny_target(7, layers=8)
LOADED = load_tiny_target(TARGET)
HEAD = tiny_peagle(8, TARGET, agree=False)


def published(key: str = "pard_token") -> TinyCheckpoint:
    """As the table has it, with default aux layers: every tensor at random."""
    config: dict[str, Any] = {**LAYOUT["config"], **{name: HEAD.config[name] for name in LAYOUT["config_of_a_model"]}}
    assert key in LAYOUT["config_of_the_mask"]
    config[key] = MASK
    hidden, dim = config["hidden_size"], config["head_dim"]
    sizes = {
        **{"H": hidden, "2H": 2 * hidden, "A": 3 * hidden, "I": config["intermediate_size"], "1": 1},
        **{"Q": config["num_attention_heads"] * dim, "K": config["num_key_value_heads"] * dim},
        **{"V": config["vocab_size"], "Vd": config["draft_vocab_size"]},
    }
    shapes = LAYOUT["tensors"] | LAYOUT["tensors_of_the_first_layer"]
    for layer in range(1, config["num_hidden_layers"]):
        shapes |= {name.format(layer): shape for name, shape in LAYOUT["tensors_of_a_layer"].items()}
    random = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn([sizes[size] for size in shape], generator=random) for name, shape in shapes.items()}
    return TinyCheckpoint(config, tensors | {name: HEAD.tensors[name] for name in ("d2t", "t2d")})


def loaded_from(directory: Path, checkpoint: TinyCheckpoint) -> Any:
    return load_eagle3(DraftSource.for_target(str(write_checkpoint(directory, checkpoint)), LOADED), LOADED)


@pytest.mark.parametrize("key", MASK_KEYS)
def test_the_published_layout_loads(key: str, tmp_path: Path) -> None:
    checkpoint = published(key)
    head = loaded_from(tmp_path, checkpoint)
    assert (head.mask.token, len(head.layers), head.config.aux_layers) == (MASK, 4, (1, 3, 4))
    assert draft_kind({name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}) is DraftKind.EAGLE_3
    expected = checkpoint.tensors["fc.weight"].double() @ checkpoint.tensors["mask_hidden"].double().view(-1)
    torch.testing.assert_close(head.mask.features, expected)
    assert torch.equal(head.embedding.weight, checkpoint.tensors["embed_tokens.weight"].double()), "it is trained"
    unread = ("mask_hidden", "d2t", "t2d")
    numbers = sum(tensor.numel() for name, tensor in checkpoint.tensors.items() if name not in unread)
    assert head.num_bytes == 8 * (numbers + checkpoint.config["draft_vocab_size"] + checkpoint.config["hidden_size"])


def of_specforge(kind: str) -> TinyCheckpoint:
    """A head with what that of speculators has, too; its EAGLE-3 layer is called another name."""
    if kind == "P-EAGLE":
        return published("mask_token_id")
    return tiny_eagle3(8, TARGET, agree=False, aux_layers=(1, 3, 4), norm_before_residual=True)


def in_speculators(kind: str, head: TinyCheckpoint, **changes: Any) -> TinyCheckpoint:
    """The same as the table has it: the layers' numbers are one level down, and other numbers name the target's."""
    layout = LAYOUTS[kind]["in_speculators"]
    own = {name: head.config.get(name) for name in ("draft_vocab_size", "mask_token_id")}
    leave_out = ("architectures", "eagle_config", "norm_before_residual", *own)
    layers = {name: value for name, value in head.config.items() if name not in leave_out}
    own |= {"transformer_layer_config": layers | {"tie_word_embeddings": True}, "speculators_config": {"verifier": {}}}
    own["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    config = layout["config"] | {name: own[name] for name in layout["config_of_a_model"]} | changes
    tensors = {name.replace("midlayer", layout.get("layer", "")): each for name, each in head.tensors.items()}
    if "more_tensors" in layout:
        tensors["embed_tokens.weight"] = TARGET.tensors["model.embed_tokens.weight"].clone()
    return TinyCheckpoint(config, tensors)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["EAGLE3", "P-EAGLE"])
def test_a_head_of_speculators_is_that_of_specforge(kind: str, given: bool, tmp_path: Path) -> None:
    """Its layers of the target, which are the default ones, may be given or not."""
    head = of_specforge(kind)
    one = loaded_from(tmp_path / "one", head)
    changes = {} if given else {"eagle_aux_hidden_state_layer_ids": None}
    other = loaded_from(tmp_path / "other", in_speculators(kind, head, **changes))
    assert one.config.aux_layers == other.config.aux_layers == (1, 3, 4)
    origin = one.config.llama.origin
    same = replace(other.config, llama=replace(other.config.llama, origin=origin), own_embedding=False)
    assert one.config == same and other.config.own_embedding == (kind == "P-EAGLE")
    assert torch.equal(one.target_ids, other.target_ids) and (one.mask is None) == (other.mask is None)
    assert (other.embedding is LOADED.embedding) == (kind == "EAGLE3")
    places = tensor_places(other)
    assert all(torch.equal(rows_of(*place), rows_of(*places[name])) for name, place in tensor_places(one).items())


def test_a_head_of_speculators_has_a_norm_before_fc_and_its_own_embedding(tmp_path: Path) -> None:
    """As its heads of gpt-oss: one norm of all that they read of the target."""
    plain, random = of_specforge("EAGLE3"), torch.Generator().manual_seed(4)
    head = in_speculators("EAGLE3", plain, norm_before_fc=True, embed_requires_grad=True)
    weight, embedding = (torch.rand(size, generator=random, dtype=torch.float64) for size in ((96,), (128, 32)))
    more = {"input_norm.weight": weight, "embed_tokens.weight": embedding}
    loaded = loaded_from(tmp_path, TinyCheckpoint(head.config, head.tensors | more))
    assert torch.equal(loaded.embedding(torch.arange(128)), embedding) and loaded.config.norm_residual
    aux = torch.randn(5, 96, generator=random, dtype=torch.float64)
    scaled = aux * (aux.pow(2).mean(-1, keepdim=True) + loaded.config.llama.rms_norm_eps).rsqrt() * weight
    found = loaded.fusion(TargetOutput(aux, aux))
    torch.testing.assert_close(found, scaled @ plain.tensors["fc.weight"].T, atol=1e-12, rtol=0)


NOT_COMPUTED: dict[str, dict[str, Any]] = {
    "norm_before_fc: found True, expected False": {"norm_before_fc": True, "speculators_model_type": "peagle"},
    "norm_before_fc must be true or false, found 'no'": {"norm_before_fc": "no"},
    "model_type: found 'mistral', expected llama or qwen3": {"transformer_layer_config": {"model_type": "mistral"}},
    "eagle_aux_hidden_state_layer_ids: found ['2'], expected layers": {"eagle_aux_hidden_state_layer_ids": ["2"]},
    "layers of the target, 0 to 7, found [-1, 3, 4]": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]},
    "speculators_model_type: found 'eagle', expected 'eagle3' or 'peagle'": {"speculators_model_type": "eagle"},
}


@pytest.mark.parametrize("message", NOT_COMPUTED)
def test_what_a_head_of_speculators_has_beside_is_named(message: str, tmp_path: Path) -> None:
    head = in_speculators("EAGLE3", of_specforge("EAGLE3"), **NOT_COMPUTED[message])
    with pytest.raises(CheckpointError, match=re.escape(message)):
        loaded_from(tmp_path, head)


def test_an_eagle3_head_has_no_mask_and_the_targets_embedding() -> None:
    plain = {name: tensor for name, tensor in HEAD.tensors.items() if name != "mask_hidden"}
    head = load_tiny_peagle(TinyCheckpoint(HEAD.config | {"architectures": ["LlamaForCausalLMEagle3"]}, plain), LOADED)
    assert head.mask is None and head.embedding is LOADED.embedding


BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "pard_token or ptd_token_id or mask_token_id: found None, expected 0 to 127": {"pard_token": None},
    "pard_token or ptd_token_id or mask_token_id: found 128, expected 0 to 127": {"pard_token": 128},
    "pard_token or ptd_token_id or mask_token_id: found '5', expected 0 to 127": {"pard_token": "5"},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_a_config_that_disagrees_is_named(message: str) -> None:
    bad = replace(HEAD, config=HEAD.config | BAD_CONFIGS[message])
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_tiny_peagle(bad, LOADED)


def test_tensors_that_disagree_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"mask_hidden: found shape \[1, 1, 32\], expected \[1, 1, 64\]"):
        load_tiny_peagle(replace(HEAD, tensors=HEAD.tensors | {"mask_hidden": torch.zeros(1, 1, 32)}), LOADED)
    without = {name: tensor for name, tensor in HEAD.tensors.items() if name != "mask_hidden"}
    with pytest.raises(CheckpointError, match="mask_hidden"):
        load_tiny_peagle(replace(HEAD, tensors=without), LOADED)


def test_the_head_says_how_it_guesses(tmp_path: Path) -> None:
    """`EAGLE3` runs both kinds of heads; random weights follow config.json."""
    eagle3, path = method_named("EAGLE3"), str(write_checkpoint(tmp_path, HEAD))
    chain = SpecSettings("EAGLE3", path, 7, 1, 8, accept=AcceptSettings())
    loaded = eagle3.load(chain, LOADED, lambda *_: None)
    assert isinstance(loaded, ParallelDraft) and loaded.num_steps == 7
    assert loaded.profile.tree is None and loaded.profile.draft_vocab_size > 0
    tree = eagle3.load(SpecSettings("EAGLE3", path, 5, 4, 8, accept=AcceptSettings()), LOADED, lambda *_: None)
    assert isinstance(tree, ParallelDraft) and tree.profile.tree == TreeShape(5, 0, 5)
    assert tree.profile.draft_vocab_size == 0, "guesses of a tree are not drawn for rejection sampling"
    (tmp_path / "model.safetensors").unlink()
    dummy = SpecSettings("EAGLE3", path, 7, 1, 8, draft_load_format="dummy", accept=AcceptSettings())
    assert isinstance(eagle3.load(dummy, LOADED, lambda *_: None), ParallelDraft)
    config = HEAD.config | {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert isinstance(eagle3.load(dummy, LOADED, lambda *_: None), ChainDraft)


def test_default_numbers_of_a_head_with_masks_are_a_chains(tmp_path: Path) -> None:
    """Those of Llama are a tree's; numbers that were given stand."""
    path, target = str(write_checkpoint(tmp_path / "head", HEAD)), str(write_checkpoint(tmp_path / "target", TARGET))
    config = EngineConfig(
        model_path=target,
        skip_tokenizer_init=True,
        device="cpu",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=path,
    )
    files = resolve_model(config)
    settings, _ = resolve(config, files, Machine(2, False))
    assert settings.spec.topk > 1
    spec, notes = resolve_drafting(settings.spec, files, config)
    assert (spec.num_steps, spec.topk, spec.width, spec.narrower) == (7, 1, 8, (1, 2, 3, 4, 6))
    assert any("(7, 1, 8): the default of a P-EAGLE head" in note for note in notes)
    given = SpecSettings("EAGLE3", path, 5, 4, 8, numbers_from=GIVEN)
    assert resolve_drafting(given, files, config) == (given, [])
