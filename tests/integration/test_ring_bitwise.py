"""The same tokens and log-probs to the last bit as plain decoding of each request alone, where that is promised.

On a CPU: weights of few bits, with and without VNNI, in batches and windows of all sizes, chains and trees; and with
--enable-deterministic-inference those in float32.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from overlap_spec_kernels import GroupedKernel
from support.bitwise import (
    alone,
    answers_of,
    assert_bits_of_alone,
    assert_same_bits,
    bitwise_requests,
    preempting,
    run_bitwise_schedule,
    turns_of,
)
from support.installed import needs_feature
from support.ring import Answer, RingConfig, tiny_loaded
from support.tiny import grouped
from support.tiny.grouped import GROUPED, grouped_kernel, grouped_kernel_of_avx2, with_grouped_linears

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.layers import recurrent
from overlap_spec.models.quantization.grouped import by_kernel
from overlap_spec.worker.startup.geometry import LoadedModels

pytestmark = needs_feature("log_probs")

COUNT = 12
REQUESTS = bitwise_requests(COUNT, 4, 16)
BATCH = RingConfig(num_slots=COUNT, num_pages=600, dtype=torch.float32)
WAYS = {
    "plain, in a batch": replace(BATCH, num_steps=0),
    "EAGLE-3": replace(BATCH, chunk_tokens=5),
    "EAGLE-3, one step in flight": replace(BATCH, depth=1, num_slots=5),
    "EAGLE-3, trees": replace(BATCH, topk=3),
    "n-grams": replace(BATCH, method="NGRAM"),
    "a model beside it": replace(BATCH, method="STANDALONE", num_steps=2),
}


def ways(*names: str) -> dict[str, RingConfig]:
    return {name: WAYS[name] for name in names}


def load(config: RingConfig, family: str = GROUPED, **shape: int) -> LoadedModels:
    given = {"method": config.method, "topk": config.topk, "family": family, **shape}
    return tiny_loaded(3, config.num_steps, torch.float32, **given)


@pytest.fixture(scope="module")
def expected(codec: TextCodec) -> list[Answer]:
    return alone(REQUESTS, codec, load)


@pytest.mark.full_but_every(3)
@pytest.mark.slow  # the next test shows the same of other kernels
@pytest.mark.parametrize("way", WAYS)
def test_a_request_has_its_bits_in_any_company(codec: TextCodec, expected: list[Answer], way: str) -> None:
    found = answers_of(REQUESTS, WAYS[way], codec, load)
    for index, (answer, only) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(answer, only, f"request {index}")


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gemma 3", "mistral with a window"])
def test_every_family_of_such_files_without_vnni(
    codec: TextCodec, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: GroupedKernel = grouped_kernel_of_avx2()
    monkeypatch.setattr(grouped, "grouped_kernel", lambda: kernel)

    def of_family(config: RingConfig) -> LoadedModels:
        given = {"method": config.method, "topk": config.topk, "family": family, "convert": with_grouped_linears}
        return replace(tiny_loaded(3, config.num_steps, torch.float32, **given), kernel=kernel)

    some = REQUESTS[:4]
    assert_bits_of_alone(some, ways("plain, in a batch", "EAGLE-3", "n-grams"), codec, of_family)


@pytest.mark.slow
def test_log_probs_of_a_large_vocabulary(codec: TextCodec) -> None:
    """Torch divides a sum over so many logits among its threads where it is the only one."""
    some = [(prompt, replace_tokens(sampling, 8)) for prompt, sampling in REQUESTS[:4]]
    wide = partial(load, vocab_size=40_960)
    assert_bits_of_alone(some, ways("plain, in a batch", "EAGLE-3"), codec, wide)


def load_dense(config: RingConfig, family: str = "llama") -> LoadedModels:
    """As --enable-deterministic-inference loads it."""
    kernel = grouped_kernel()
    given = {"method": config.method, "topk": config.topk, "family": family}
    convert = partial(by_kernel, kernel=kernel)
    return replace(tiny_loaded(3, config.num_steps, torch.float32, convert=convert, **given), kernel=kernel)


@pytest.mark.full_but_every(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral with a window", "gemma 3", "olmo 2", "phi 3", "phi 3 in part"]
)
def test_float32_with_the_flag(codec: TextCodec, family: str) -> None:
    of_family = partial(load_dense, family=family)
    some = REQUESTS[:7]
    assert_bits_of_alone(some, ways("plain, in a batch", "EAGLE-3", "EAGLE-3, trees"), codec, of_family)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.full)], ids=str)
def test_random_schedules_in_float32_with_the_flag(codec: TextCodec, rounds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in rounds:
        kind = {"method": "NGRAM"} if seed % 3 == 2 else {"topk": 2} if seed % 3 == 1 else {}
        seen += run_bitwise_schedule(seed, codec, load_dense, dtype=torch.float32, **kind)
    assert seen["finished"] and seen["accepted"], seen


RECURRING = ("qwen3.5", "qwen3 next", "granite 4", "granite 4 moe")
OTHERS = {RECURRING[0]: "full", RECURRING[1]: "slow"}
SHORT = 4  # positions of a chunk, so that prompts have several


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize(
    "family", [*RECURRING[1:3], *(pytest.param(name, marks=pytest.mark.full) for name in RECURRING[::3])]
)
def test_layers_that_recur_in_random_schedules(
    codec: TextCodec, family: str, rounds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "CHUNK", SHORT)
    monkeypatch.setattr(*preempting(7))
    seen: Counter[str] = Counter()
    for seed in rounds:
        states = {"state_chunk": SHORT, "num_snapshots": 1 + seed % 5, "snapshot_interval": SHORT * (1 + seed % 3)}
        method = ("NGRAM of chains", "STANDALONE", "EAGLE3")[seed % 3]
        kind = {"method": method, "deterministic": True, "dtype": torch.float32}
        seen += run_bitwise_schedule(seed, codec, partial(load_dense, family=family), **states, **kind)
    assert seen["finished"] and seen["preemptions"], seen
    assert len(rounds) < 10 or all(seen[what] for what in ("accepted", "chunk_splits", "prefix_hit_tokens")), seen


ONE = [RECURRING[2], *(pytest.param(name, marks=getattr(pytest.mark, mark)) for name, mark in OTHERS.items())]
STATES = {"deterministic": True, "dtype": torch.float32, "state_chunk": SHORT, "num_snapshots": 8}


@pytest.mark.parametrize("family", ONE)
def test_output_is_computed_again_as_it_was(codec: TextCodec, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preemption, of which there are many; prompts are cut where there is room."""
    monkeypatch.setattr(recurrent, "CHUNK", SHORT)
    monkeypatch.setattr(*preempting(3))
    ways = {"n-grams": replace(BATCH, method="NGRAM of chains", num_slots=4, page_size=1, chunks_seed=3)}
    ways["in graphs"] = replace(BATCH, num_steps=0, num_slots=4, chunk_tokens=64, graph_batch_sizes=(1, 4))
    assert_bits_of_alone(REQUESTS[:6], ways, codec, partial(load_dense, family=family), **STATES)


@pytest.mark.parametrize("family", ONE)
def test_turns_of_layers_that_recur(codec: TextCodec, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request has said is a prompt's in the next turn, and is cached as that alone."""
    monkeypatch.setattr(recurrent, "CHUNK", SHORT)
    monkeypatch.setattr(*preempting(3))
    config = replace(BATCH, num_slots=3, page_size=SHORT, chunk_tokens=16)
    cached = turns_of(config, codec, partial(load_dense, family=family), (18, 7), STATES)
    assert cached == [0, 16, 16, 40, 40, 60]


def replace_tokens(sampling: SamplingParams, most: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=most, temperature=0.0, seed=0, ignore_eos=True, log_probs=sampling.log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.full)], ids=str)
def test_random_schedules(codec: TextCodec, rounds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in rounds:
        kind = {"method": "NGRAM"} if seed % 3 == 1 else {"topk": 2} if seed % 3 == 2 else {}
        seen += run_bitwise_schedule(seed, codec, load, dtype=torch.float32, family=GROUPED, **kind)
    assert seen["finished"], seen
    assert len(rounds) < 10 or all(seen[what] for what in ("preemptions", "chunk_splits", "prefix_hit_tokens")), seen
