"""What a forward reads and computes, counted by hand from a tiny checkpoint."""

from dataclasses import dataclass, replace

import pytest
import torch
from support.ring import tiny_loaded
from support.tiny.models import CPU, load_tiny_draft, load_tiny_target, tiny_eagle3, tiny_target

from overlap_spec.features.ngram.worker import FusedDraft
from overlap_spec.messages import Guessing
from overlap_spec.metrics.step_floor import Ceiling
from overlap_spec.models.interfaces import DraftProfile
from overlap_spec.models.work import ForwardWork
from overlap_spec.speculative.drafts import ChainDraft, NoDraft, SmallModelDraft
from overlap_spec.speculative.methods import method_named
from overlap_spec.worker.startup.geometry import LoadedModels
from overlap_spec.worker.startup.start_costs import measure_ceiling, roofline

HIDDEN, INNER, DIM, HEADS, KV_HEADS, VOCAB = 32, 64, 16, 4, 2, 131
LAYER = HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * INNER
NORMS = 2 * HIDDEN
CEILING = Ceiling(1e9, 1e9)  # to measure a device takes longer than all else here


def loaded(tied: bool, draft: bool = False) -> LoadedModels:
    checkpoint = tiny_target(1, tie_word_embeddings=tied, vocab=VOCAB)
    target = load_tiny_target(checkpoint, torch.float64)
    if not draft:
        return LoadedModels(target, NoDraft(), method_named("NONE"))
    head = load_tiny_draft(tiny_eagle3(2, checkpoint, draft_vocab=112), target)
    return LoadedModels(target, ChainDraft(head, 3), method_named("EAGLE3"))


def test_the_embedding_counts_only_as_a_head() -> None:
    want = 8 * (2 * (LAYER + NORMS) + HIDDEN + VOCAB * HIDDEN)
    for tied in (False, True):
        shape = roofline(loaded(tied), torch.float64, CPU, CEILING).target
        assert shape.weight_bytes == want
        assert shape.head_flop == 2 * VOCAB * HIDDEN
        assert shape.row_flop == 2 * (2 * (LAYER + NORMS) + HIDDEN)  # norms are small enough to count as maps
        assert shape.kv_bytes == 2 * 2 * KV_HEADS * DIM * 8
        assert shape.pair_flop == 4 * HEADS * DIM * 2


def test_plain_decoding_drafts_nothing() -> None:
    found = roofline(loaded(tied=False), torch.float64, CPU, CEILING)
    assert found.draft == found.extend
    assert found.draft.weight_bytes == found.draft.row_flop == found.draft.kv_bytes == 0


def test_only_the_extend_fuses() -> None:
    found = roofline(loaded(tied=False, draft=True), torch.float64, CPU, CEILING)
    fused = 2 * HIDDEN * HIDDEN  # two aux hidden states
    assert found.extend.weight_bytes - found.draft.weight_bytes == 8 * fused
    assert found.extend.row_flop - found.draft.row_flop == 2 * fused
    wide = LAYER + HIDDEN * (HEADS + 2 * KV_HEADS) * DIM  # attention reads embedding and features
    assert found.draft.weight_bytes == 8 * (wide + NORMS + 2 * HIDDEN + 112 * HIDDEN)


@pytest.mark.parametrize(
    ("method", "guessing"),
    [
        ("EAGLE3", Guessing.STEPS),
        ("STANDALONE", Guessing.STEPS),
        ("DFLASH", Guessing.BLOCK),
        ("DSPARK", Guessing.BLOCK),
        ("P-EAGLE", Guessing.MASKS),
    ],
)
def test_how_a_draft_guesses_is_told(method: str, guessing: Guessing) -> None:
    models = tiny_loaded(1, 3, method=method)
    found = roofline(models, torch.float64, CPU, CEILING)
    assert found.guessing is guessing
    assert found.draft_rows == (models.proposer.profile.block.num_rows if guessing is Guessing.BLOCK else 1)


def test_a_branch_of_n_grams_takes_no_draft_step() -> None:
    models = tiny_loaded(1, 3)
    fused = replace(models, proposer=FusedDraft(models.proposer, 3, 7))
    found = roofline(fused, torch.float64, CPU, CEILING)
    assert (found.longest, found.most_guesses) == (8, 3)
    tree = fused.proposer.profile.tree
    assert tree is not None and (tree.branch, tree.branch_flag) == (7, "--speculative-fuse-ngram")


def test_the_states_of_a_hybrid_are_counted() -> None:
    models = tiny_loaded(1, 0, family="qwen3 next")
    state = models.target.kv_shape.state
    assert roofline(models, torch.float64, CPU, CEILING).target.state_bytes == state.bytes_per_state(torch.float64) > 0
    assert roofline(loaded(tied=False), torch.float64, CPU, CEILING).target.state_bytes == 0


@dataclass(frozen=True)
class SmallDraft:
    """A loaded small model, of which only the profile is asked for."""

    profile: DraftProfile


def test_a_small_model_reads_two_rows_of_a_chain_whatever_its_window() -> None:
    draft = SmallDraft(DraftProfile(work=ForwardWork(weight_bytes=7, row_flop=400, head_flop=60, pair_flop=80)))
    found = SmallModelDraft(draft, num_steps=3).profile.extend_work
    assert found == ForwardWork(weight_bytes=7, row_flop=200, head_flop=60, pair_flop=40), (
        "of the rows of a window of 4"
    )


def test_an_unknown_device_is_measured() -> None:
    ceiling = measure_ceiling(CPU, torch.float32)
    assert 1e8 < ceiling.bytes_per_s < 1e13
    assert 1e8 < ceiling.flop_per_s < 1e15
