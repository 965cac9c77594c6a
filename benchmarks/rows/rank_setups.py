"""The engines that are timed with one rank and with two, and their loads; also in a tiny form for a CPU."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from mixtures import TINY, TINY_DRAFT

from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_from
from rows.setups import CHAIN, PLAIN, SYNTHETIC, Flags, plain_shape, shape

RANKS = (1, 2)
PROMPT = 8192  # tokens


@dataclass(frozen=True)
class Setup:
    """A model in a format, with a method. `prompts`: lengths of those whose first token is timed."""

    case: str
    name: str
    flags: Flags
    batches: tuple[int, ...]
    ranks: tuple[int, ...] = RANKS
    prompts: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        return self.name.rpartition(" ")[2]

    def config(self, ranks: int) -> EngineConfig:
        """Only the steps that are timed are captured."""
        most = max(self.batches)
        own: Flags = {"tp_size": ranks, "max_running_requests": most, "cuda_graph_bs": self.batches}
        own |= {"context_length": PROMPT + 256, "max_total_tokens": max(PROMPT + 2048, 512 * most)}
        own |= {"mem_fraction_static": 0.95}  # two engines share a GPU, and their pools have a size
        return config_from(own | {"disable_radix_cache": True, "audit_rate": 0.0} | self.flags)

    def sizes(self) -> list[tuple[int, str, int]]:
        """All rows: ranks, kind and size."""
        sizes = [("batch", batch) for batch in self.batches] + [("prompt", length) for length in self.prompts]
        return [(ranks, *size) for size in sizes for ranks in self.ranks]


def setups() -> list[Setup]:
    """All, in the order in which they are measured."""
    found = []
    for case, name, model, draft, batches, ranks in (
        ("8b", "8b", "llama-3.1-8b", "llama-3.1-8b", (1, 8, 32), RANKS),
        ("70b", "70b fp8", "llama-3.3-70b-fp8", "llama-3.3-70b", (1, 8), RANKS),
        ("70b", "70b", "llama-3.3-70b", "llama-3.3-70b", (1, 8), (2,)),  # 141 GB
        ("mixture", "30b-a3b", "qwen3-30b-a3b", "qwen3-30b-a3b", (1, 8, 32), RANKS),
    ):
        plain = PLAIN | plain_shape(model)
        chain = CHAIN | SYNTHETIC | shape(draft) | {"model_path": plain["model_path"]}
        found.append(Setup(case, f"{name} plain", plain, batches, ranks, (PROMPT,)))
        found.append(Setup(case, f"{name} chain", chain, batches, ranks))
    return found


def tiny(setup: Setup, directory: Path) -> Setup:
    """The same of a tiny shape, on a CPU."""
    flags = setup.flags | {"device": "cpu", "dtype": "float32", "context_length": 512, "max_total_tokens": 4096}
    for name, sizes in (
        ("model_path", TINY | {"intermediate_size": 256}),
        ("speculative_draft_model_path", TINY_DRAFT),
    ):
        if name in flags:
            path = Path(flags[name])
            (directory / path.name).mkdir(parents=True, exist_ok=True)
            config = json.loads((path / "config.json").read_text())
            config |= {key: size for key, size in sizes.items() if key in config}
            (directory / path.name / "config.json").write_text(json.dumps(config))
            flags |= {name: str(directory / path.name)}
    return replace(setup, flags=flags, batches=setup.batches[:2], prompts=tuple(64 for _ in setup.prompts))
