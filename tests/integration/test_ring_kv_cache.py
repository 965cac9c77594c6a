"""KV pages of 8 bits in the whole ring: tokens are plain decoding's over the same format, without exception in float64.

The target's scales are so small that many values are clamped, so tokens depend on how values are stored.
"""

from dataclasses import replace

import pytest
import torch
from support.eight_bits import E4M3, E5M2, Tokens, answers
from support.random_schedules import run_schedules, run_seeds
from support.ring import RingConfig

from overlap_spec.config import AuditSettings
from overlap_spec.frontend.codec import TextCodec

PLAIN = RingConfig(num_steps=0, kv_dtype=E4M3)


@pytest.fixture(scope="module")
def plain(codec: TextCodec) -> Tokens:
    return answers(codec, PLAIN)[0]


@pytest.mark.full_but_every(2)
@pytest.mark.parametrize(
    ("method", "topk"),
    [
        pytest.param("EAGLE3", 1, marks=pytest.mark.slow),
        ("EAGLE3", 3),
        pytest.param("EAGLE", 1, marks=pytest.mark.full),
        pytest.param("NEXTN", 1, marks=pytest.mark.slow),
        pytest.param("NEXTN of several layers", 1, marks=pytest.mark.full),
        pytest.param("STANDALONE", 1, marks=pytest.mark.slow),
        pytest.param("STANDALONE", 3, marks=pytest.mark.full),
        pytest.param("NGRAM", 1, marks=pytest.mark.slow),
    ],
)
def test_speculation_changes_nothing(codec: TextCodec, plain: Tokens, method: str, topk: int) -> None:
    tokens, num_steps = answers(codec, replace(PLAIN, method=method, num_steps=3, topk=topk))
    assert tokens == plain
    assert 0 < num_steps < sum(map(len, tokens)) - len(tokens), "some guess was right"


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk_tokens", [7, pytest.param(4, marks=pytest.mark.full), pytest.param(64, marks=pytest.mark.full)]
)
def test_how_a_prompt_is_cut_changes_nothing(codec: TextCodec, plain: Tokens, chunk_tokens: int) -> None:
    assert answers(codec, replace(PLAIN, chunk_tokens=chunk_tokens))[0] == plain


@pytest.mark.slow
def test_the_format_does_change_tokens(codec: TextCodec, plain: Tokens) -> None:
    """Otherwise the other tests would show nothing."""
    exact = answers(codec, replace(PLAIN, kv_dtype=None))[0]
    other = answers(codec, replace(PLAIN, kv_dtype=E5M2))[0]
    assert exact != plain != other != exact


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma 3", "mistral with a window"])
def test_windows(codec: TextCodec, family: str) -> None:
    config = replace(PLAIN, family=family)
    plain = answers(codec, config)[0]
    assert answers(codec, replace(config, num_steps=3, chunk_tokens=5))[0] == plain
    assert answers(codec, replace(config, num_steps=3, topk=3))[0] == plain


@pytest.mark.full  # the test above and test_ring_ranks.py show as much
def test_2_schedules(codec: TextCodec) -> None:
    """Too few for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(3, 5), codec, {"kv_dtype": E4M3, "topk": 3})
    assert seen["finished"] > 5 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full
def test_random_schedules(codec: TextCodec) -> None:
    """Trees, whose accepted rows are moved. Aborts, preemption, prefix hits, chunks, depth 1 and 2."""
    run_schedules(8, codec, kv_dtype=E4M3, topk=3)


@pytest.mark.full
@pytest.mark.parametrize("method", ["EAGLE3", "NEXTN", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_random_schedules_of_every_method(codec: TextCodec, method: str, kv_dtype: torch.dtype) -> None:
    """Every request is audited."""
    run_schedules(20, codec, method=method, kv_dtype=kv_dtype, audit=AuditSettings(rate=1.0))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "method", "topk"),
    [
        ("deepseek v3", "EAGLE3", 3),
        ("deepseek v2 lite", "NGRAM", 1),
        ("glm 4.7 flash", "NEXTN", 3),
        ("gemma 4 e", "NEXTN with an assistant", 1),
        ("qwen3 next", "NEXTN", 1),
        ("gpt oss", "EAGLE3", 2),
        ("mimo v2 flash", "NEXTN of several layers", 1),
    ],
)
def test_random_schedules_of_other_caches(codec: TextCodec, family: str, method: str, topk: int) -> None:
    """Latent rows, heads of two sizes, states beside pages, sinks, values narrower than keys."""
    seen = run_seeds(range(4), codec, {"family": family, "method": method, "topk": topk, "kv_dtype": E4M3})
    assert seen["finished"] > 5 and seen["accepted"] + seen["rejected"] > 0, dict(seen)
