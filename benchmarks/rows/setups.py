"""The engines that rows are measured on, and the sizes of the loads; both also in a tiny form for a CPU."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _tests_path import ROOT
from msgspec.structs import replace

from overlap_spec.config import EngineConfig

SHAPES = Path(os.path.relpath(ROOT / "benchmarks" / "shapes"))  # reports name it
LONGEST = 114688  # tokens of a context
Flags = dict[str, Any]  # of EngineConfig

DUMMY: Flags = {"load_format": "dummy", "skip_tokenizer_init": True}
SYNTHETIC: Flags = {"speculative_simulate_acc_len": (2.5,)}
SPECULATIVE: Flags = {"log_level": "warning", "speculative_algorithm": "EAGLE3"}
CHAIN = SPECULATIVE | {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
PLAIN: Flags = {"log_level": "warning", "speculative_algorithm": "NONE"}


def plain_shape(name: str) -> Flags:
    """Random weights of a shape."""
    return DUMMY | {"model_path": str(SHAPES / name)}


def shape(name: str) -> Flags:
    """With a draft head."""
    return plain_shape(name) | {"speculative_draft_model_path": str(SHAPES / f"{name}-eagle3")}


def smaller(model_path: str, directory: Path, sizes: Flags) -> str:
    """The path of a shape whose text model has these sizes."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    of_text = config.get("text_config", config)
    of_text |= sizes
    target = directory / Path(model_path).name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def with_layers(config: EngineConfig, count: int | None, directory: str) -> EngineConfig:
    """The engine of a shape's first `count` layers. None: all."""
    if count is None:
        return config
    return replace(config, model_path=smaller(config.model_path, Path(directory), {"num_hidden_layers": count}))


EIGHT_B = shape("llama-3.1-8b")
SHORT: Flags = {"max_running_requests": 2, "max_total_tokens": 16384, "context_length": 4096}
MANY: Flags = {"max_running_requests": 32, "max_total_tokens": 32768, "context_length": 2048}
CROWD: Flags = {"max_running_requests": 256, "max_total_tokens": 262144, "context_length": 2048}
LONG: Flags = {"max_running_requests": 32, "context_length": LONGEST, "max_total_tokens": 2 * LONGEST + 32768}
ENGINES: dict[str, Flags] = {
    "8B": CHAIN | SYNTHETIC | EIGHT_B | LONG,
    "8B fp8 KV": CHAIN | SYNTHETIC | EIGHT_B | LONG | {"kv_cache_dtype": "fp8_e4m3"},
    "8B plain": PLAIN | plain_shape("llama-3.1-8b") | MANY,
    **{
        name: flags | plain_shape(f"llama-3.1-8b-{weights}") | MANY
        for weights in ("fp8", "int4")
        for name, flags in {
            f"8B {weights}": CHAIN | SYNTHETIC | EIGHT_B,
            f"8B {weights} plain": PLAIN,
        }.items()
    },
    "SmolLM2": CHAIN | CROWD | {"skip_tokenizer_init": True},
    "SmolLM2 plain": PLAIN | CROWD | {"skip_tokenizer_init": True},
    "1B": CHAIN | SYNTHETIC | shape("llama-3.2-1b") | SHORT,
    "1B plain": PLAIN | plain_shape("llama-3.2-1b") | SHORT,
    "3B": CHAIN | SYNTHETIC | shape("llama-3.2-3b") | SHORT,
    "3B plain": PLAIN | plain_shape("llama-3.2-3b") | SHORT,
}
SERVERS: dict[str, Flags] = {  # of `overlap-spec serve`; without numbers it follows measured acceptance
    "SmolLM2": SPECULATIVE,
    "8B": SPECULATIVE | EIGHT_B | {"max_total_tokens": 65536},
    "SmolLM2 crowd": CHAIN | CROWD,
}

Sizes = Mapping[str, int]  # by the name that parts of a row have


@dataclass(frozen=True)
class Scale:
    """The sizes of the loads. `repeats`: rounds in turns, after one that does not count."""

    batches: Sizes = field(default_factory=lambda: {"1": 1, "8": 8, "32": 32})
    repeats: int = 5
    plain_tokens: int = 48
    chain_tokens: int = 96
    contexts: Sizes = field(default_factory=lambda: {"8k": 8192, "32k": 32768, "100k": 100_000})
    prompts_of: Sizes = field(default_factory=lambda: {"8k": 5, "32k": 3, "100k": 2})
    context_answer: int = 200
    turn_tokens: int = 200
    turns: int = 9
    new_prompts: Mapping[str, Sizes] = field(
        default_factory=lambda: {"SmolLM2": {"32": 32, "64": 64}, "8B": {"8": 8, "32": 32}}
    )
    one_token_calls: int = 9
    crowd: int = 256
    connections: Sizes = field(default_factory=lambda: {"64": 64, "256": 256})
    answer: int = 512
    client_processes: int = 4
    chats: bool = True  # SmolLM2's new prompts are chats


TINY = Scale(
    batches={"1": 1, "8": 2, "32": 3},
    repeats=1,
    plain_tokens=8,
    chain_tokens=16,
    contexts={"8k": 80, "32k": 200, "100k": 400},
    prompts_of={"8k": 2, "32k": 1, "100k": 1},
    context_answer=16,
    turn_tokens=20,
    turns=2,
    new_prompts={"SmolLM2": {"32": 2, "64": 3}, "8B": {"8": 2, "32": 3}},
    one_token_calls=2,
    crowd=4,
    connections={"64": 2, "256": 4},
    answer=40,
    client_processes=2,
    chats=False,
)


def tiny_engines(directory: str) -> tuple[dict[str, Flags], dict[str, Flags]]:
    """The same names, of a tiny target and head whose config files are all there is of them."""
    from support.tiny.models import tiny_eagle3, tiny_target  # imports torch, which nothing else needs here

    target = tiny_target(seed=1, max_position_embeddings=2048)
    for name, checkpoint in (("target", target), ("head", tiny_eagle3(seed=2, target=target))):
        (Path(directory) / name).mkdir()
        (Path(directory) / name / "config.json").write_text(json.dumps(checkpoint.config))
    paths = {"model_path": f"{directory}/target", "speculative_draft_model_path": f"{directory}/head"}
    chain = CHAIN | DUMMY | paths | {"max_total_tokens": 8000, "max_running_requests": 4}
    tree = chain | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    plain = PLAIN | {name: value for name, value in chain.items() if not name.startswith("speculative")}
    kinds = {"tree": tree | SYNTHETIC, "plain": plain}
    kinds["KV"] = chain | SYNTHETIC | {"kv_cache_dtype": "fp8_e4m3"}
    engines = {name: kinds.get(name.rpartition(" ")[2], chain | SYNTHETIC) for name in ENGINES}
    return engines, dict.fromkeys(SERVERS, chain)
