"""A logit processor of one's own (the example's) in the whole engine: speculation changes nothing, whatever happens.

The oracle decodes plainly and works the rule out in plain Python. Schedules are random: prefix hits,
preemptions, chunks, depth 1 and 2, chains and trees, greedy and sampled.
"""

from collections import Counter

import pytest
from support.own_processors import OWN_PROCESSORS
from support.random_schedules import run_schedules, run_seeds
from support.tiny.methods import CHAINS, EVERY_METHOD

from overlap_spec.frontend.codec import TextCodec

WHOLE, OF_OUTPUT = OWN_PROCESSORS
GROWS_TREES = [name for name in EVERY_METHOD if name not in CHAINS and "NGRAM" not in name and "trees" not in name]


def assert_it_decided(seen: Counter[str]) -> None:
    assert seen["forbidden"] > 0 and seen["accepted"] > 0 and seen["rejected"] > 0, dict(seen)


@pytest.mark.full_but_every(13)
@pytest.mark.slow
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method(codec: TextCodec, method: str) -> None:
    assert_it_decided(run_seeds(range(1, 3), codec, {"method": method, "processor": WHOLE}))


@pytest.mark.slow
@pytest.mark.full_but_every(11)
@pytest.mark.parametrize("method", GROWS_TREES)
def test_every_method_that_grows_trees(codec: TextCodec, method: str) -> None:
    assert_it_decided(run_seeds(range(1, 3), codec, {"method": method, "topk": 3, "processor": WHOLE}))


@pytest.mark.full
@pytest.mark.parametrize(("processor", "topk"), [(OF_OUTPUT, 2), (WHOLE, 1), (WHOLE, 2), (OF_OUTPUT, 1)])
def test_random_schedules(codec: TextCodec, processor: str, topk: int) -> None:
    """With preemptions and prefix hits, which `run_schedules` asserts: the output begins where it began before."""
    seen = run_schedules(25, codec, processor=processor, topk=topk)
    assert_it_decided(seen)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_200_random_schedules(codec: TextCodec, method: str) -> None:
    assert_it_decided(run_schedules(200, codec, method=method, processor=OF_OUTPUT))
