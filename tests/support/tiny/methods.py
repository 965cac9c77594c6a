"""Every drafting method on tiny models: what random schedules run, by name. A method is added by one line."""

from collections.abc import Callable

import torch

from overlap_spec.config import EngineConfig, NgramSettings, SpecSettings
from overlap_spec.features import without_absent
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.speculative.drafts import ChainDraft, LoadedProposer, MultiLayerDraft, SharedKVDraft, SmallModelDraft
from overlap_spec.speculative.proposers.block import BlockDraft
from overlap_spec.speculative.proposers.parallel import ParallelDraft
from support.random_trees import RandomTreeDraft
from support.tiny.assistant import load_tiny_assistant, tiny_assistant
from support.tiny.dflash import load_tiny_dflash, tiny_dflash
from support.tiny.dspark import load_tiny_dspark, tiny_dspark
from support.tiny.eagle import load_tiny_eagle, tiny_eagle
from support.tiny.layouts import QWEN3_5
from support.tiny.models import TinyCheckpoint, load_tiny_draft, tiny_eagle3
from support.tiny.mtp import (
    in_deepseek_layout,
    load_tiny_layers,
    load_tiny_mtp,
    tiny_mimo_v2,
    tiny_mtp,
    tiny_nextn,
    tiny_qwen3_next,
    tiny_step,
)
from support.tiny.peagle import load_tiny_peagle, tiny_peagle
from support.tiny.standalone import load_tiny_language_draft, tiny_language_draft

TinyMethod = Callable[[int, TinyCheckpoint, LoadedTarget, int], LoadedProposer]  # seed, target twice, draft steps


def _eagle3(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return ChainDraft(load_tiny_draft(tiny_eagle3(seed, checkpoint), target), num_steps)


def _eagle(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return ChainDraft(load_tiny_eagle(tiny_eagle(seed, checkpoint), target), num_steps)


def _mapped_eagle(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randperm(target.vocab_size, generator=random)[: target.vocab_size * 3 // 4]  # in no order
    return ChainDraft(load_tiny_eagle(tiny_eagle(seed, checkpoint), target, ids), num_steps)


def _mtp(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return ChainDraft(load_tiny_mtp(tiny_mtp(seed, checkpoint), target), num_steps)


def _standalone(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return SmallModelDraft(load_tiny_language_draft(tiny_language_draft(seed, checkpoint), target), num_steps)


def _smaller_standalone(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    """Of a vocabulary that is padded less than the target's."""
    draft = tiny_language_draft(seed, checkpoint, vocab=target.vocab_size * 7 // 8)
    return SmallModelDraft(load_tiny_language_draft(draft, target), num_steps)


def _nextn(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    """Of a target that is published with such layers its own kind, of others Llama's."""
    if checkpoint.config["architectures"][0] in ("Qwen3NextForCausalLM", *QWEN3_5):
        return ChainDraft(load_tiny_mtp(tiny_qwen3_next(seed, checkpoint), target), num_steps)
    has_its_own = "n_routed_experts" in checkpoint.config and "hybrid_layer_pattern" not in checkpoint.config
    layer = tiny_nextn(seed, checkpoint) if has_its_own else in_deepseek_layout(tiny_mtp(seed, checkpoint))
    return ChainDraft(load_tiny_mtp(layer, target), num_steps)


def _assistant(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    """Of a Gemma 4 alone."""
    return SharedKVDraft(load_tiny_assistant(tiny_assistant(seed, checkpoint), target), num_steps)


def _dflash(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    aux_layers = (0, checkpoint.config["num_hidden_layers"] - 1)
    return BlockDraft(load_tiny_dflash(tiny_dflash(seed, checkpoint, aux_layers=aux_layers), target, num_steps + 1))


def _dspark(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    aux_layers = (0, checkpoint.config["num_hidden_layers"] - 1)
    return BlockDraft(load_tiny_dspark(tiny_dspark(seed, checkpoint, aux_layers=aux_layers), target, num_steps))


def _peagle(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    head = load_tiny_peagle(tiny_peagle(seed, checkpoint), target)
    assert head.mask is not None, "a tiny P-EAGLE head has a mask row"
    return ParallelDraft(head, head.mask, num_steps)


def _random_trees(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return RandomTreeDraft.of(target, num_steps)


def _mimo_v2(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return MultiLayerDraft(load_tiny_layers(tiny_mimo_v2(seed, checkpoint, num_steps + 1), target, num_steps))


def _step(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return MultiLayerDraft(load_tiny_layers(tiny_step(seed, checkpoint, num_steps), target, num_steps))


def _ngram_draft(asked: NgramSettings, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    from overlap_spec.features.ngram.worker import NgramDraft  # the feature may be taken away

    return NgramDraft.of(asked, num_steps, target.embedding.device)


def _ngram(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    """Trees of n-grams, in a log that evicts all the time."""
    return _ngram_draft(NgramSettings(max_match=4, capacity=1024), target, num_steps)


def _ngram_by_frequency(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    asked = NgramSettings(max_match=6, max_breadth=4, by_frequency=True, capacity=4096)
    return _ngram_draft(asked, target, num_steps)


def _ngram_chain(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    asked = NgramSettings(min_match=2, max_breadth=1, by_frequency=True, capacity=1 << 16)
    return _ngram_draft(asked, target, num_steps)


def _fused(chain: TinyMethod) -> TinyMethod:
    """With a branch of n-grams beside its chains."""

    def load(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
        without_absent(EngineConfig(speculative_fuse_ngram=COPIED))  # refused by name if its feature is not there
        from overlap_spec.features.ngram.worker import fuse

        draft = chain(seed, checkpoint, target, num_steps)
        fused = fuse(SpecSettings("", None, num_steps, 1, num_steps + 1 + COPIED, num_copied=COPIED), draft)
        assert fused is not None
        return fused

    return load


COPIED = 5  # guesses of n-grams beside a chain
BLOCKS = ("DFLASH", "DSPARK", "P-EAGLE")  # which make all guesses in one forward
MULTI_LAYER = ("NEXTN of several layers", "NEXTN of several layers, chained")
CHAINS = ("DSPARK", *MULTI_LAYER)  # which guess chains alone

# The name of its `Method`, and how it is made.
TINY_METHODS: dict[str, tuple[str, TinyMethod]] = {
    "EAGLE3": ("EAGLE3", _eagle3),
    "EAGLE": ("EAGLE", _eagle),
    "EAGLE with a token map": ("EAGLE", _mapped_eagle),
    "NEXTN": ("NEXTN", _mtp),
    "NEXTN in DeepSeek's layout": ("NEXTN", _nextn),
    MULTI_LAYER[0]: ("NEXTN", _mimo_v2),
    MULTI_LAYER[1]: ("NEXTN", _step),
    "STANDALONE": ("STANDALONE", _standalone),
    "STANDALONE of fewer tokens": ("STANDALONE", _smaller_standalone),
    "P-EAGLE": ("EAGLE3", _peagle),
    "DFLASH": ("DFLASH", _dflash),
    "DSPARK": ("DSPARK", _dspark),
    "NGRAM": ("NGRAM", _ngram),
    "NGRAM by frequency": ("NGRAM", _ngram_by_frequency),
    "NGRAM of chains": ("NGRAM", _ngram_chain),
}

# What asks tensors for their values: on a CPU alone.
ON_HOST: dict[str, tuple[str, TinyMethod]] = {"random trees": ("NONE", _random_trees)}
ASSISTANT = "NEXTN with an assistant"
OF_GEMMA4: dict[str, tuple[str, TinyMethod]] = {ASSISTANT: ("NEXTN", _assistant)}  # needs such a target
EVERY_METHOD = TINY_METHODS | ON_HOST
FUSED: dict[str, tuple[str, TinyMethod]] = {  # a window holds two proposers' guesses
    "EAGLE3 beside n-grams": ("EAGLE3", _fused(_eagle3)),
    "P-EAGLE beside n-grams": ("EAGLE3", _fused(_peagle)),
    "DSPARK beside n-grams": ("DSPARK", _fused(_dspark)),
}
KNOWN_METHODS = EVERY_METHOD | OF_GEMMA4 | FUSED
