"""Measure vLLM 0.25.1 on one GPU: one JSON line a measurement, with the fields that `benchmarks/documents` reads.

    python measure.py --models models --output vllm-0.25.1-h200.jsonl [--only 8b-plain wide-8b-plain]

It needs a Python with vLLM and a checkout of this repository, of which nothing is installed there. `models` has
`smollm2-135m` and `eagle3-smollm2`, the checkpoint and its head; the 8B shape and a head of random weights are written
there. Every engine is a process of its own, and the next one starts when it has ended.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

VERSION = "0.25.1"
ROOT = Path(__file__).resolve().parents[3]
SHAPES, PEER64 = ROOT / "benchmarks/shapes", ROOT / "overlap_spec/data/prompts/peer64.json"
LLAMA, HEAD = "llama-3.1-8b", "llama-3.1-8b-eagle3"  # of SHAPES
SMOLLM2, SMOLLM2_HEAD, VLLM_HEAD = "smollm2-135m", "eagle3-smollm2", "eagle3-smollm2-vllm"
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
GUESSES, ACCEPTED = 3, 2.5  # of a step; committed tokens of one, by vLLM's synthetic acceptance
WARM_UP, FIRSTS, RUNS = 24, 3, 2  # tokens; calls for one token; runs. Of calls and of runs the fastest counts
GIB = 1 << 30

Line = dict[str, Any]
Prompts = Callable[[int], list[list[int]]]  # as many prompts, other ones in every call


@dataclass(frozen=True)
class Case:
    """One engine. `config`, `run`: fields of its lines. `length`, `tokens`: of a random prompt, and of an answer."""

    config: str
    batches: tuple[int, ...]
    run: str = ""
    length: int = 128
    tokens: int = 512
    kv_bytes: int = 12 * GIB
    most: int = 64  # requests at a time
    context: int = 4096

    @property
    def name(self) -> str:
        return f"{self.run}-{self.config}".removeprefix("-")

    @property
    def is_small(self) -> bool:
        return self.config.startswith("smol")

    def arguments(self, models: Path) -> Line:
        """For vLLM's class LLM. Others are its defaults."""
        speculates = self.config.endswith("eagle3")
        head = VLLM_HEAD if self.is_small else HEAD
        synthetic = {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": ACCEPTED,
            "draft_load_config": {"load_format": "auto"},  # the target's weights are random, the head's are in a file
        }
        draft = {"method": "eagle3", "model": str(models / head), "num_speculative_tokens": GUESSES}
        rows = [batch * (GUESSES + 1) if speculates else batch for batch in self.batches]
        return {
            "model": str(models / (SMOLLM2 if self.is_small else LLAMA)),
            **({} if self.is_small else {"load_format": "dummy"}),
            **({"speculative_config": draft | ({} if self.is_small else synthetic)} if speculates else {}),
            "dtype": "bfloat16",
            "max_model_len": self.context,
            "max_num_seqs": self.most,
            "kv_cache_memory_bytes": self.kv_bytes,
            "gpu_memory_utilization": 0.2,
            "compilation_config": {"cudagraph_capture_sizes": sorted({1, 2, 4, *self.batches, *rows})},
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 1,
        }


LONG = 40960
CASES = (
    Case("8b-plain", (1, 8, 32)),
    Case("8b-eagle3", (1, 8, 32)),
    Case("smol-plain", (1, 8, 32, 64), kv_bytes=4 * GIB),
    Case("smol-eagle3", (1, 8, 32, 64), kv_bytes=4 * GIB),
    Case("8b-plain", (64, 128, 256), "wide", tokens=256, kv_bytes=25 * GIB, most=256),
    Case("8b-eagle3", (64, 128, 256), "wide", tokens=256, kv_bytes=25 * GIB, most=256),
    Case("8b-plain", (1, 8), "8k", 8192, tokens=128, kv_bytes=25 * GIB, most=16, context=LONG),
    Case("8b-eagle3", (1, 8), "8k", 8192, tokens=128, kv_bytes=25 * GIB, most=16, context=LONG),
    Case("8b-plain", (1,), "32k", 32768, tokens=128, kv_bytes=25 * GIB, most=4, context=LONG),
)


class Engine(Protocol):
    """What is measured."""

    def answer(self, prompts: Sequence[list[int]], num_tokens: int) -> int:
        """Greedy answers of exactly so many tokens to all prompts at once. Returns the tokens of all answers."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Totals since the start: `steps`, `drafts`, `accepted`."""
        ...


@dataclass(frozen=True)
class Measurement:
    """Measures an engine, batch by batch."""

    engine: Engine
    case: Case
    prompts: Prompts
    clock: Callable[[], float] = field(default=time.perf_counter)

    def lines(self) -> Iterator[Line]:
        """One for each batch size."""
        return (self.batch(size) for size in self.case.batches)

    def batch(self, size: int) -> Line:
        """The first token's time is the wall time of a call for one token; a step's is what is left by the steps."""
        for _ in range(2):
            self._call(size, WARM_UP)
        first = min(self._call(size, 1)[0] for _ in range(FIRSTS))
        runs = [self._call(size, self.case.tokens) for _ in range(RUNS)]
        wall, tokens, length, counted = min(runs, key=lambda run: run[0])
        steps, drafts = int(counted["steps"]), int(counted["drafts"])
        decoded = [(run[1] - size) / (run[0] - first) for run in runs]
        line = {
            **{"config": self.case.config, "kind": "batch", "bs": size, "in": round(length / size, 1)},
            **{"out": self.case.tokens, "tokens": tokens, "prefill_s": round(first, 4), "wall_s": round(wall, 3)},
            **{"tok_s": round(tokens / wall, 1), "decode_tok_s": round(max(decoded), 1)},
            "decode_tok_s_runs": [round(speed, 1) for speed in decoded],
            "engine_steps": steps,
            "ms_per_engine_step": round(1000 * (wall - first) / (steps - 1), 4),  # one step is the prefill's
        }
        accepted = {"num_drafts": drafts, "accept_len": round(1 + counted["accepted"] / drafts, 3)} if drafts else {}
        return line | accepted | ({"run": self.case.run} if self.case.run else {})

    def _call(self, size: int, num_tokens: int) -> tuple[float, int, int, dict[str, float]]:
        """Returns wall seconds, the tokens of all answers and of all prompts, and what was counted meanwhile."""
        prompts, before = self.prompts(size), self.engine.counters()
        began = self.clock()
        tokens = self.engine.answer(prompts, num_tokens)
        seconds, after = self.clock() - began, self.engine.counters()
        return seconds, tokens, sum(map(len, prompts)), {name: after[name] - before[name] for name in after}


class VllmEngine:
    """vLLM's offline class."""

    COUNTED = {
        "vllm:iteration_tokens_total": "steps",
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }

    def __init__(self, arguments: Line) -> None:
        import vllm

        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(**json.loads(json.dumps(arguments)))  # it adds to the dictionaries that it is given

    def answer(self, prompts: Sequence[list[int]], num_tokens: int) -> int:
        sampling = self._sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(len(each.outputs[0].token_ids) for each in self._llm.generate(asked, sampling, use_tqdm=False))

    def counters(self) -> Mapping[str, float]:
        found = dict.fromkeys(self.COUNTED.values(), 0.0)
        for metric in self._llm.get_metrics():
            if metric.name in self.COUNTED:
                found[self.COUNTED[metric.name]] += metric.count if hasattr(metric, "count") else metric.value
        return found


def random_prompts(length: int) -> Prompts:
    """Token ids of the 8B shape."""
    drawn = random.Random(7)
    return lambda count: [[drawn.randrange(1000, 30000) for _ in range(length)] for _ in range(count)]


def chats(models: Path) -> Prompts:
    """The prompts of `peer64.json` in SmolLM2's template, from the first one on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models / SMOLLM2 / "tokenizer.json"))
    texts = json.loads(PEER64.read_text())
    ids = [tokenizer.encode(CHAT.format(text), add_special_tokens=False).ids for text in texts]
    return lambda count: [list(ids[row % len(ids)]) for row in range(count)]


def write_models(models: Path) -> None:
    """Write what is not there yet: the 8B shape, its head of random weights, and SmolLM2's head as vLLM reads it."""
    for name in (LLAMA, HEAD):
        (models / name).mkdir(parents=True, exist_ok=True)
        (models / name / "config.json").write_text((SHAPES / name / "config.json").read_text())
    if not (weights := models / HEAD / "model.safetensors").exists():
        from safetensors.torch import save_file

        save_file(random_head(json.loads((SHAPES / HEAD / "config.json").read_text())), weights)
    source, target = models / SMOLLM2_HEAD, models / VLLM_HEAD
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(head_for_vllm(json.loads((source / "config.json").read_text()))))
    for path in source.iterdir():
        if not (link := target / path.name).exists():
            link.symlink_to(path.resolve())


def head_for_vllm(config: Line) -> Line:
    """vLLM counts the layers before a hidden state, where we name the layer that it is after."""
    layers = config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    return config | {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}


def random_head(config: Line) -> Line:
    """An EAGLE-3 head with a vocabulary of its own, as a trained one has."""
    import torch

    drawn = torch.Generator().manual_seed(1)
    hidden, wide, rows = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (rows, hidden),
        "midlayer.self_attn.q_proj": (hidden, 2 * hidden),
        **{f"midlayer.self_attn.{name}_proj": (kv, 2 * hidden) for name in ("k", "v")},
        "midlayer.self_attn.o_proj": (hidden, hidden),
        **{f"midlayer.mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj": (hidden, wide),
    }
    norms = ("norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    tokens = torch.randperm(config["vocab_size"], generator=drawn)[:rows].sort().values
    drafted = torch.zeros(config["vocab_size"], dtype=torch.bool)
    drafted[tokens] = True
    return {
        "d2t": tokens - torch.arange(rows),
        "t2d": drafted,
        **{f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms},
        **{
            f"{name}.weight": (0.02 * torch.randn(*shape, generator=drawn)).bfloat16() for name, shape in shapes.items()
        },
    }


def refusal(models: Path) -> str:
    """Why nothing can be measured; empty if something can."""
    if importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed in {sys.executable}; these lines are of {VERSION}: pip install vllm=={VERSION}"
    if (found := importlib.metadata.version("vllm")) != VERSION:
        return f"vLLM {found} is installed; these lines are of {VERSION}: pip install vllm=={VERSION}"
    missing = [str(models / name) for name in (SMOLLM2, SMOLLM2_HEAD) if not (models / name / "config.json").is_file()]
    return f"not there: {', '.join(missing)}" if missing else ""


def measure(case: Case, models: Path, output: Path) -> None:
    """Start an engine and append its lines."""
    began = time.monotonic()
    arguments = case.arguments(models)
    engine = VllmEngine(arguments)
    started = round(time.monotonic() - began, 1)
    info = {"config": case.config, "kind": "info", "vllm": VERSION, "args": arguments, "start_s": started}
    prompts = chats(models) if case.is_small else random_prompts(case.length)
    with output.open("a") as lines:
        for line in (info | _machine(), *Measurement(engine, case, prompts).lines()):
            lines.write(json.dumps(line) + "\n")


def _machine() -> Line:
    import torch

    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {"torch": torch.__version__, "gpu": subprocess.check_output(asked, text=True).strip()}


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--output", type=Path, default=Path(f"vllm-{VERSION}.jsonl"))
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], help="engines; default: all")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # in the process of one
    given = parser.parse_args(words)
    if reason := refusal(given.models):
        print(reason, file=sys.stderr)
        return 1
    if given.engine:
        measure(next(case for case in CASES if case.name == given.engine), given.models, given.output)
        return 0
    write_models(given.models)
    wanted = [case.name for case in CASES if not given.only or case.name in given.only]
    own = [sys.executable, __file__, "--models", str(given.models), "--output", str(given.output), "--engine"]
    return int(any([subprocess.run([*own, name]).returncode for name in wanted]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
