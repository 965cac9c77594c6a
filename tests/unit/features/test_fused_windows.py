"""A window of a draft's chain and, beside it, what n-grams continue: the tree, its flags, and who cannot have one."""

from typing import Any

import pytest
import torch
from support.ring import tiny_loaded

from overlap_spec.config import EngineConfig, Machine, ModelFiles, SpecSettings
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError
from overlap_spec.features.ngram.worker import FusedDraft, fuse, with_branch
from overlap_spec.models.interfaces import TreeShape

TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 128}
FILES = ModelFiles(
    weights="target", config=TARGET, tokenizer_dir=None, eos_token_ids=(2,), context_length=512, vocab_size=128
)
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Of each guess, what leads to it from the root."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for column, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        if token >= 0:
            assert parent < column and parent in paths, "parents come first, and are guesses"
            path = (*paths[parent], token)
            assert path not in paths.values(), "siblings are distinct"
            paths[column] = path
    return set(paths.values()) - {()}


@pytest.mark.parametrize(("depth", "count"), [(3, 5), (5, 3), (4, 4), (1, 6), (6, 1), (3, 0)])
def test_a_window_has_both_and_what_they_share_once(depth: int, count: int) -> None:
    random = torch.Generator().manual_seed(depth)
    chain = torch.randint(0, 2, (depth, 200), generator=random)
    copied = torch.randint(0, 2, (count, 200), generator=random)
    found = torch.randint(0, count + 1, (200,), generator=random)
    copied[torch.arange(count)[:, None] >= found] = -1
    guesses = with_branch(chain, copied)
    assert guesses.parents is not None and len(guesses.tokens) == depth + count
    for row in range(200):
        drafted, repeated = chain[:, row].tolist(), [token for token in copied[:, row].tolist() if token >= 0]
        wanted = {tuple(path[: end + 1]) for path in (drafted, repeated) for end in range(len(path))}
        assert paths_of(guesses.tokens[:, row].tolist(), guesses.parents[:, row].tolist()) == wanted
        assert guesses.tokens[:depth, row].tolist() == drafted, "a narrow window is the chain"


def settings_of(**flags: Any) -> SpecSettings:
    given = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "draft", "device": "cpu"} | flags
    return resolve(EngineConfig(model_path="target", **given), FILES, Machine(2, False))[0].spec


def test_the_window_is_as_wide_as_both() -> None:
    given = settings_of(**CHAIN, speculative_fuse_ngram=6)
    assert (given.num_steps, given.topk, given.width, given.narrower) == (3, 1, 10, ())
    default = settings_of(speculative_fuse_ngram=6)
    assert (default.num_steps, default.topk, default.width) == (5, 1, 12), "of a Llama, whose default is a tree"
    assert default.narrower == (1, 2, 3, 4, 6)


BAD: dict[str, dict[str, Any]] = {
    "name a method with a draft model": {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": None},
    "use --speculative-eagle-topk 1": {
        "speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6,
    },
    "--speculative-use-rejection-sampling does not judge": {"speculative_use_rejection_sampling": True},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_go_with_it_is_refused_by_name(message: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-fuse-ngram: .*{message}"):
        settings_of(speculative_fuse_ngram=4, **BAD[message])
    with pytest.raises(ConfigError, match="--speculative-attention-mode: trees have a kernel of their own"):
        settings_of(speculative_fuse_ngram=4, speculative_attention_mode="decode")


def test_a_draft_whose_kv_is_its_guesses_cannot_have_a_branch() -> None:
    spec = SpecSettings("STANDALONE", "draft", 3, 1, 8, num_copied=4)
    with pytest.raises(ConfigError, match="--speculative-fuse-ngram: the draft of STANDALONE"):
        fuse(spec, tiny_loaded(3, 3, method="STANDALONE").proposer)
    assert fuse(SpecSettings("EAGLE3", "draft", 3, 1, 4), tiny_loaded(3, 3).proposer) is None
    fused = fuse(spec, tiny_loaded(3, 3).proposer)
    tree = TreeShape(4, drafted_levels=3, branch=4, branch_flag="--speculative-fuse-ngram")
    assert isinstance(fused, FusedDraft) and fused.profile.tree == tree and not fused.profile.draft_vocab_size
