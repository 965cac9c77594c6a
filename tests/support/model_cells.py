"""One cell of the matrix of models: an architecture in a format, loaded from files, with a drafting method."""

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from overlap_spec import hub
from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.config.speculation import ONLY_CHAINS, keeps_states
from overlap_spec.errors import OverlapSpecError
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.quantization.linear import StoredWeight
from overlap_spec.models.registry import ARCHITECTURES as KNOWN
from overlap_spec.models.targets.llama import FAMILIES
from support.matrix_columns import COLUMNS
from support.near_oracle import NearOracle
from support.ring import RingConfig, running, tiny_models
from support.summaries import describe, update
from support.tiny.formats import ARCHITECTURES, FORMATS
from support.tiny.models import TinyCheckpoint

SEED, NUM_STEPS, NUM_TOKENS = 3, 3, 10
PLAIN, EQUAL, NEAR, DIFFERS = "NONE", "equal", "near-ties", "differs"
MOST = 0.15  # of logits with a deviation of 3: what rounding to 16 bits explains
CPU = torch.device("cpu")
METHODS = (
    "EAGLE",
    "EAGLE3",
    "EAGLE3 tree",
    "NEXTN",
    "NEXTN, several layers",
    "STANDALONE",
    "NGRAM tree",
)  # of each kind
PROMPTS = [[(7 * i) % 100 + 10 for i in range(length)] for length in (1, 19)]
SAMPLINGS = [
    SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True),
    SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.9, seed=5, ignore_eos=True),
]
Tokens = list[list[int]]


@dataclass(frozen=True)
class Cell:
    """A place in the matrix."""

    architecture: str
    format: str
    method: str

    def __str__(self) -> str:
        return f"{self.architecture}, {self.format}, {self.method}"

    @property
    def has_trees(self) -> bool:
        """Whether guesses are trees."""
        return self.method.endswith("tree")

    @property
    def rank(self) -> str:
        """In this order cells are sampled: any few of them are spread over the matrix."""
        return sha256(str(self).encode()).hexdigest()


CELLS = [Cell(name, format_, method) for name in ARCHITECTURES for format_ in FORMATS for method in METHODS]


@dataclass(frozen=True)
class Served:
    """A target that was loaded, and the float checkpoint that drafts are made for; or why it is refused."""

    target: LoadedTarget | None
    checkpoint: TinyCheckpoint
    refusal: str = ""


class MatrixFile:
    """The JSON file that outcomes of cells go to. Cells of another source are forgotten: a table is of one."""

    def __init__(self, path: Path, test: Path) -> None:
        self._path = path
        self._run = _described() | {"command": f'python -m pytest -m "" {test.as_posix()} --matrix FILE'}
        self._noted: list[tuple[Cell, str]] = []

    def note(self, architecture: str, format_: str, method: str, outcome: str) -> None:
        """Keep the outcome of a cell."""
        self._noted.append((Cell(architecture, format_, method), outcome))

    def write(self) -> None:
        """Add what was noted."""
        update(self._path, self._fill_in)

    def _fill_in(self, matrix: dict[str, Any]) -> None:
        if matrix.get("run", {}).get("source") != self._run["source"]:
            matrix.clear()
        matrix.update(benchmark="model_matrix", run=self._run, formats=list(FORMATS), methods=list(METHODS))
        for cell, outcome in self._noted:
            formats = matrix.setdefault("cells", {}).setdefault(cell.architecture, {})
            row = by_method(formats.get(cell.format, {})) | {cell.method: outcome}
            formats[cell.format] = outcome if row == dict.fromkeys(METHODS, outcome) else row


def by_method(row: str | dict[str, str]) -> dict[str, str]:
    """The outcomes of a format in the file, where those that are all the same stand once."""
    return dict.fromkeys(METHODS, row) if isinstance(row, str) else row


@functools.cache
def _described() -> dict[str, Any]:
    """Reads all sources."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return describe(device, torch.get_num_threads())


@functools.lru_cache(maxsize=4)
def served(architecture: str, format_: str, dtype: torch.dtype, place: torch.device) -> Served:
    """Written to files and loaded as an engine loads them."""
    kind = FORMATS[format_]
    checkpoint = kind.checkpoint(architecture, SEED)
    with tempfile.TemporaryDirectory() as directory:
        path, kept = kind.write(Path(directory), checkpoint)
        try:
            with kept_in_format(place):
                target = kind.convert(load_target(files_of(path, kind.flags), dtype, place))
        except OverlapSpecError as error:
            told = str(error).replace(f"{path}: layers.", "layers.")
            return Served(None, kept, told.replace(f"{path.parent}/", "").replace(f"{path}/", ""))
    return Served(target, _drafted_for(kept))


def _drafted_for(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """Heads have Llama's layers, as most are trained: those of the target's own family have tests of their own."""
    of_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": None}
    name = checkpoint.config["architectures"][0]
    is_relative = name in FAMILIES and not KNOWN[name].is_mixture
    return TinyCheckpoint(checkpoint.config | of_llama, checkpoint.tensors) if is_relative else checkpoint


@contextlib.contextmanager
def kept_in_format(place: torch.device) -> Iterator[None]:
    """On a CPU, linears stay in their format too, as on a GPU with kernels for it, and the references multiply."""
    if place.type != "cpu":
        yield
        return
    with patch.object(StoredWeight, "runs_on", lambda self, device, dtype: True):
        yield


def files_of(path: Path, flags: dict[str, object]) -> ModelFiles:
    """As `serve` finds them."""
    return hub.resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True, **flags))


def outcome_of(cell: Cell, codec: TextCodec, dtype: torch.dtype, place: torch.device) -> str:
    """`EQUAL` if all tokens are those of plain decoding, `DIFFERS`, or the sentence by which it is refused.

    `NEAR`: in 16 bits, where near-ties may fall the other way.
    """
    found = served(cell.architecture, cell.format, dtype, place)
    if found.target is None:
        return found.refusal
    if cell.has_trees and keeps_states(found.checkpoint.config):
        return ONLY_CHAINS
    plain = plain_tokens(cell.architecture, cell.format, codec, dtype, place)
    tokens = tokens_of(found, cell.method, codec, dtype, place)
    if tokens == plain:
        return EQUAL
    return NEAR if dtype.itemsize == 2 and are_best(cell, codec, [*tokens, *plain]) else DIFFERS


def are_best(cell: Cell, codec: TextCodec, answers: Tokens) -> bool:
    """Whether no token falls short of the best one by more than rounding explains, by the same weights in float64."""
    exact = served(cell.architecture, cell.format, torch.float64, CPU).target
    assert exact is not None
    oracle = NearOracle(exact, codec, MOST)
    asked = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    return all(
        oracle.falls_short(prompt, tokens, sampling) < MOST
        for (prompt, sampling), tokens in zip(asked * (len(answers) // len(asked)), answers, strict=True)
    )


@functools.lru_cache(maxsize=4)
def plain_tokens(architecture: str, format_: str, codec: TextCodec, dtype: torch.dtype, place: torch.device) -> Tokens:
    """Of plain decoding: one request at a time, one step in flight, nothing cached."""
    config = RingConfig(num_steps=0, num_slots=1, depth=1, prefix_cache=False, dtype=dtype, place=place)
    return asyncio.run(_answers(served(architecture, format_, dtype, place), PLAIN, 0, codec, config))


def tokens_of(found: Served, method: str, codec: TextCodec, dtype: torch.dtype, place: torch.device) -> Tokens:
    """Of all requests at once, drafted by the method."""
    name, topk = COLUMNS[method]
    config = RingConfig(
        method=name, num_steps=NUM_STEPS, topk=topk, num_slots=3, num_pages=300, dtype=dtype, place=place
    )
    return asyncio.run(_answers(found, name, NUM_STEPS, codec, config))


async def _answers(found: Served, method: str, num_steps: int, codec: TextCodec, config: RingConfig) -> Tokens:
    assert found.target is not None
    models = tiny_models(found.checkpoint, found.target, SEED + 1, num_steps, method, config.topk)
    async with running(models, config, codec) as ring:
        asked = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        answers = await asyncio.gather(*(ring.ask(prompt, sampling) for prompt, sampling in asked))
    return [answer.token_ids for answer in answers]
