"""On a GPU with --enable-deterministic-inference: tokens and log-probs have the bits of the request alone.

Alone: by plain decoding, one request after the other, without graphs, each prompt in one chunk. Against that: batches,
chains of several methods, n-grams, chunks, prefix hits, preemption, aborts, graphs and windows of all sizes.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.bitwise import (
    Load,
    assert_bits_of_alone,
    bitwise_requests,
    preempting,
    run_bitwise_schedule,
    turns_of,
)
from support.installed import needs_feature
from support.ring import RingConfig, tiny_loaded
from support.tiny.families import TINY_FAMILIES
from support.tiny.quantized import FAMILIES_IN_FORMATS

from overlap_spec.config import AttentionSettings
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.layers.linear_forms import in_one_order
from overlap_spec.worker.startup.geometry import LoadedModels

pytestmark = needs_feature("log_probs")

ENGINE: dict[str, Any] = {
    "place": torch.device("cuda", 0),
    "dtype": torch.bfloat16,
    "attention": AttentionSettings(target_in_order=True),
    "warm": True,  # a request waits 30 s, in which kernels of another type may still be compiled
}
SHAPES: dict[str, dict[str, Any]] = {  # of the target: two layers as wide as a model's
    "tiny": {},
    "SmolLM2": {"hidden": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "1B": {"hidden": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
}
SHAPES["SmolLM2"] |= {"head_dim": 64}
SHAPES["1B"] |= {"head_dim": 64}
COUNT = 24
REQUESTS = bitwise_requests(COUNT, 11, 32)
BATCH = RingConfig(num_slots=COUNT, num_pages=3000, max_len=400, **ENGINE)
GRAPHS = {"graph_batch_sizes": (1, 2, 4, 8, 16, 24)}
WAYS = {
    "plain, in a batch": replace(BATCH, num_steps=0),
    "plain, in graphs": replace(BATCH, num_steps=0, **GRAPHS),
    "EAGLE-3": replace(BATCH, chunk_tokens=7),
    "EAGLE-3, in graphs": replace(BATCH, chunk_tokens=64, widths_seed=1, **GRAPHS),
    "EAGLE-3, one step in flight": replace(BATCH, depth=1, num_slots=5),
    "n-grams": replace(BATCH, method="NGRAM of chains", num_steps=3),
}


def load(config: RingConfig, family: str = "llama", **shape: Any) -> LoadedModels:
    given = {"method": config.method, "family": family, "convert": in_one_order, **config.shape, **shape}
    return tiny_loaded(3, config.num_steps, config.dtype, config.place, **given)


def assert_bits_in(ways: tuple[str, ...], codec: TextCodec, load: Load, **engine: Any) -> None:
    requests = engine.pop("requests", REQUESTS)
    assert_bits_of_alone(requests, {way: WAYS[way] for way in ways}, codec, load, **(ENGINE | engine))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_has_its_bits_in_any_company(codec: TextCodec, shape: str) -> None:
    ways = ("plain, in graphs", "EAGLE-3, in graphs") if shape == "1B" else tuple(WAYS)
    assert_bits_in(ways, codec, partial(load, **SHAPES[shape]))


OF_LATENTS = {"kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {  # with which families have the kernels of published ones
    "gemma 3": {"hidden": 512, "head_dim": 256, "sliding_window": 100},
    "gemma 4": {"hidden": 512, "head_dim": 256, "sliding_window": 100, "global_head_dim": 512},
    "qwen3 moe": {"hidden": 1024, "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    "gpt oss in mxfp4": {"hidden": 512, "head_dim": 64, "num_attention_heads": 64, "sliding_window": 100},
    "deepseek v3": OF_LATENTS | {"hidden": 512, "head_dim": 64, "v_head_dim": 128, "num_attention_heads": 16},
}
SIZES["qwen3 moe"] |= {"head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 16}
SIZES["gpt oss in mxfp4"] |= {"num_key_value_heads": 8, "intermediate_size": 512}
SIZES["deepseek v3"] |= {"num_key_value_heads": 16, "moe_intermediate_size": 256}
GEMMA4 = ("gemma 4", "gemma 4 e", "gemma 4 moe")
MIXTURES = ("mixtral", "qwen3 moe", "glm 4.5", "gpt oss", "deepseek v3", "deepseek v2 lite", "glm 4.7 flash")
IN_FEW_BITS = ("qwen3 moe in fp8", "mixtral in int4", "gpt oss in mxfp4", "deepseek v3 in fp8")


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "mistral with a window", "phi 3", "gemma 3", "olmo 2", *GEMMA4, *MIXTURES]
)
def test_families(codec: TextCodec, family: str) -> None:
    """Biases, norms of heads, norms behind, windows, experts, sinks, latents."""
    assert_bits_in(("EAGLE-3, in graphs", "EAGLE-3"), codec, partial(load, family=family), requests=REQUESTS[::2])


@pytest.mark.parametrize("family", SIZES)
def test_families_as_large_as_published_ones(codec: TextCodec, family: str) -> None:
    ways = "EAGLE-3, in graphs", "n-grams"
    assert_bits_in(ways, codec, partial(load, family=family, **SIZES[family]), requests=REQUESTS[1::2])


@pytest.mark.parametrize("changed", [{"dtype": torch.float16}, {"kv_dtype": torch.float8_e4m3fn}], ids=str)
def test_formats(codec: TextCodec, changed: dict[str, Any]) -> None:
    assert_bits_in(("plain, in graphs", "EAGLE-3"), codec, load, **changed)


@pytest.mark.parametrize("family", ["llama in fp8", "llama in int4", *IN_FEW_BITS])
def test_weights_of_few_bits(codec: TextCodec, family: str) -> None:
    assert_bits_in(("plain, in graphs", "EAGLE-3"), codec, partial(load, family=family), requests=REQUESTS[::2])


@pytest.mark.parametrize("family", ["llama in fp8", "llama in int4"])
def test_weights_of_few_bits_in_float16(codec: TextCodec, family: str) -> None:
    given = {"dtype": torch.float16, "requests": REQUESTS[1::2]}
    assert_bits_in(("EAGLE-3, in graphs",), codec, partial(load, family=family), **given)


STATES: dict[str, Any] = {"deterministic": True, "num_snapshots": 6, "page_size": 16}
WIDE = {"hidden": 64, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
WHOLE = {"hidden": 128, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
FEW_BITS = {  # with sizes of whole blocks
    "qwen3 next in fp8": (
        "qwen3 next",
        "fp8 by block",
        {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    ),
    "qwen3.5 in int4": ("qwen3.5", "awq", {"intermediate_size": 128}),
}
RECURRING = ("qwen3 next", "qwen3.5", "granite 4", "granite 4 moe", "wide heads and states", *FEW_BITS)
OF_STATES = {
    "plain, in graphs": replace(BATCH, num_steps=0, chunk_tokens=128, **GRAPHS),
    "EAGLE-3, in graphs": replace(BATCH, chunk_tokens=64, widths_seed=1, **GRAPHS),
    "n-grams": replace(BATCH, method="NGRAM of chains", chunk_tokens=200),
    "EAGLE-3, few slots": replace(BATCH, depth=1, num_slots=3, chunk_tokens=70),
}


@pytest.fixture(params=RECURRING)
def recurring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.setitem(TINY_FAMILIES, "wide heads and states", TINY_FAMILIES["qwen3 next"] | WIDE)
    for name, (family, kind, sizes) in FEW_BITS.items():
        monkeypatch.setitem(FAMILIES_IN_FORMATS, name, (family, kind, WHOLE | sizes))
    return partial(load, family=request.param)


def test_layers_that_recur(codec: TextCodec, recurring: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The youngest is preempted again and again: its output is computed as windows computed it."""
    monkeypatch.setattr(*preempting(5))
    assert_bits_of_alone(REQUESTS, OF_STATES, codec, recurring, **(ENGINE | STATES))


def test_turns_of_layers_that_recur(codec: TextCodec, recurring: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*preempting(3))
    config = replace(BATCH, num_slots=2, num_pages=200, chunk_tokens=64)
    cached = turns_of(config, codec, recurring, (150, 46), ENGINE | STATES)
    assert cached == [0, 128, 128, 192, 192, 256], cached


@pytest.mark.parametrize("graphs", [False, True])
def test_random_schedules(codec: TextCodec, graphs: bool, record_summary) -> None:
    seen: Counter[str] = Counter()
    sizes = {"graph_batch_sizes": (1, 2, 4, 6)} if graphs else {}
    for seed in range(8):
        method = {"method": "NGRAM of chains"} if seed % 3 == 2 else {}
        seen += run_bitwise_schedule(seed, codec, load, **ENGINE, **method, **sizes)
    record_summary(f"bits_{'graphs' if graphs else 'eager'}", {"schedules": 8, **seen}, torch.cuda.get_device_name())
    assert seen["finished"] and seen["accepted"], seen


@pytest.mark.parametrize("family", ["gpt oss", "deepseek v3"])
def test_random_schedules_of_families(codec: TextCodec, family: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        method = {"method": "NGRAM of chains"} if seed % 3 == 2 else {}
        sizes = {"graph_batch_sizes": (1, 2, 4, 6)} if seed % 2 else {}
        seen += run_bitwise_schedule(seed, codec, partial(load, family=family), **ENGINE, **method, **sizes)
    assert seen["finished"], seen
