"""Random schedules with a model that is divided among ranks: plain decoding of the whole one, without exception.

Ranks are threads, each with a worker of its own; all get the same plans, and must answer the same (`ranked_models.py`).
"""

from dataclasses import replace

import pytest
from support.random_schedules import run_schedules, run_seeds
from support.reference import eagle3
from support.reference.mtp import MIMO, ReferenceMtp, generate as generate_mtp
from support.ring import RingConfig, tiny_loaded
from support.speculated import NUM_TOKENS, PROMPT, Step, speculated
from support.threaded_ranks import on_ranks
from support.tiny.methods import TINY_METHODS
from support.tiny.models import tiny_eagle3, tiny_target
from support.tiny.mtp import tiny_mtp

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.layers.parallel import Rank

FAMILIES = ("llama", "qwen3 moe", "deepseek v3")  # dense, a mixture, latent attention with experts
WAYS = [("EAGLE3", 1), ("EAGLE3", 2), ("NGRAM", 1), ("NEXTN in DeepSeek's layout", 1), ("STANDALONE", 1)]
CASES = [(family, *way) for way in WAYS for family in FAMILIES]
CASES += [("llama", method, 1) for method in TINY_METHODS if (method, 1) not in WAYS]
CASES += [(family, method, 2) for method in ("NEXTN", "STANDALONE") for family in FAMILIES]


def test_a_schedule(codec: TextCodec) -> None:
    """Of a draft that has the target's embedding and head, of which each rank has a part."""
    seen = run_seeds(range(6, 7), codec, {"ranks": 2, "method": "NEXTN"})
    assert seen["finished"] > 3 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full_but_every(74)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("family", "method", "topk"), CASES)
def test_2_schedules(codec: TextCodec, family: str, method: str, topk: int, ranks: int) -> None:
    """Too few for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(6, 9, 2), codec, {"ranks": ranks, "family": family, "method": method, "topk": topk})
    assert seen["finished"] > 5 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ranks", "family"), [(2, "llama"), (2, "qwen3 moe"), (2, "deepseek v3"), (4, "llama"), (4, "deepseek v3")]
)
@pytest.mark.parametrize(("method", "topk"), WAYS)
def test_30_random_schedules(codec: TextCodec, method: str, topk: int, ranks: int, family: str, record_summary) -> None:
    seen = run_schedules(30, codec, ranks=ranks, family=family, method=method, topk=topk)
    name = f"schedules_ranks_{ranks}_{family}_{method}_{topk}".replace(" ", "_").replace("'", "")
    record_summary(name, {"schedules": 30, **seen})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["EAGLE3", "NEXTN"])
def test_guesses_and_accept_lengths_are_those_of_the_loop(method: str) -> None:
    """Of transformers' Llama, and of the draft written out."""
    from test_tree_reference import transformers_model  # imports transformers

    target = tiny_target(7, layers=3)  # an EAGLE-3 head reads all layers but the last, of which no sum is handed out
    embed, head = target.tensors["model.embed_tokens.weight"], target.tensors["lm_head.weight"]
    model = transformers_model(target)
    if method == "EAGLE3":
        draft = tiny_eagle3(8, target)
        made, generate = eagle3.ReferenceHead(draft.tensors, draft.config, embed), eagle3.generate
    else:
        draft = tiny_mtp(8, target)
        made, generate = ReferenceMtp(draft.tensors, draft.config, embed, head, MIMO), generate_mtp
    _, wanted = generate(model, made, PROMPT, 3, NUM_TOKENS)
    config = RingConfig(method=method, num_steps=3, chunk_tokens=64)

    def steps(rank: Rank) -> list[Step]:
        return speculated(tiny_loaded(7, 3, method=method, layers=3, rank=rank), config, rank)

    expected = [Step(step.guesses, step.committed) for step in wanted]
    assert len({step.accept_len for step in expected}) > 1, "some guesses are accepted and some are not"
    for found in on_ranks(2, steps):
        assert [replace(step, parents=[]) for step in found][: len(expected)] == expected
