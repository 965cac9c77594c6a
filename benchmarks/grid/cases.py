"""The cases of the grid: models with methods, by name, and how many requests of what length each is measured with."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traffic import tiny_flags
from width_policy import CHAIN, EAGLE3, SHAPES, TREE, numbers

from overlap_spec.bench.methods import Tokens
from overlap_spec.bench.workload import RANDOM, chat_prompts, load_prompts, random_prompts
from overlap_spec.config.fields import config_from

BATCHES, FIXED_BATCHES, LENGTHS = (1, 8, 24, 32, 100, 128, 200, 256), (1, 32, 128, 256), (64, 256)
UP_AND_DOWN = (1, 24, 100, 200, 256, 256, 256, 100, 24, 1)
HIGH, LOW = (3.5, 0), (1.3, 65536)  # acceptance, and the first seed of the requests that have it
FALLS = {"high": (HIGH[1],), "low": (LOW[1],), "mixed": (HIGH[1], LOW[1])}  # first seeds
FALLING = (1, 32, 128, 256)
PROMPT_TOKENS = 128
CONTEXT_LENGTH, ROOM = 4096, 64
SEED = 20261126
START_S = 60.0  # of an engine of 8B, and some calls
FIXED = {"fixed 2": numbers(1, 1, 2), "fixed 4": CHAIN, "fixed 8": TREE}
FIXED_NGRAM = {f"fixed {width}": {"speculative_num_draft_tokens": width} for width in (2, 4, 12)}


@dataclass(frozen=True)
class Case:
    """A model with a method, by default. `fixed`: numbers of other engines, by name; they are measured in one round.

    `beside`: cases that have plain decoding in common, and `at_once` of them fit on a device with it. `falling`:
    batches of calls whose acceptance falls. `only`: nothing but cells of these batches is measured. `fixed_batches`: of
    calls of fixed numbers; `of_low`: those are made at the second acceptance, too. `start_s`: with less time than that
    no engine is started.
    """

    flags: Mapping[str, Any]
    prompts: str = RANDOM
    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = LENGTHS
    fixed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    turns: tuple[int, ...] = ()
    falling: tuple[int, ...] = ()
    only: tuple[int, ...] = ()
    beside: str = "smollm2"
    at_once: int = 4
    fixed_batches: tuple[int, ...] = FIXED_BATCHES
    of_low: bool = False
    start_s: float = START_S

    @property
    def means(self) -> tuple[float, ...]:
        """Of synthetic acceptance; the first is that of requests whose seeds begin at 0."""
        found: tuple[float, ...] = self.flags.get("speculative_simulate_acc_len", ())
        return found

    def cells(self) -> list[tuple[int, int]]:
        drawn = [(batch, length) for batch in self.batches for length in self.lengths]
        return [cell for cell in drawn if not self.only or cell[0] in self.only]


def drawn(cases: Mapping[str, Case]) -> list[tuple[int, int]]:
    """The cells of cases that are measured by turns: in the same order, whichever of them are left out."""
    order = [(batch, length) for batch in BATCHES for length in LENGTHS]
    random.Random(SEED).shuffle(order)
    wanted = {cell for case in cases.values() for cell in case.cells()}
    return [*(cell for cell in order if cell in wanted), *sorted(wanted.difference(order))]


def known_cases(heads: Path | None) -> dict[str, Case]:
    """All of the grid. `heads`: a folder with draft models for SmolLM2."""
    model = {"model_path": str(SHAPES / "llama-3.1-8b"), "load_format": "dummy"}
    shape = EAGLE3 | model | {"speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3")}
    about: dict[str, Any] = {"fixed": FIXED, "turns": UP_AND_DOWN, "beside": "8b", "at_once": 2}  # 110 of 139 GiB
    # All have two acceptances: so what one has measured and compiled as it started, the next one has there.
    found = {f"8b-{mean}": Case(shape | accepting(mean, LOW[0]), **about) for mean in (2.5, 1.3)}
    in_order = shape | accepting(2.5) | {"enable_deterministic_inference": True}  # default numbers are a chain's
    found["8b-2.5-in-order"] = Case(in_order, beside="8b", at_once=2)
    found["8b-3.5"] = Case(shape | accepting(HIGH[0], LOW[0]), **about, falling=FALLING)
    small = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(SHAPES / "llama-3.2-1b")}
    found["8b-standalone"] = Case(model | small | accepting(2.5), batches=(1, 32, 128), beside="8b", at_once=2)
    hybrid = {"speculative_algorithm": "NEXTN", "model_path": str(SHAPES / "qwen3.5-9b"), "load_format": "dummy"}
    mixture = shape | {"speculative_draft_model_path": str(SHAPES / "qwen3-30b-a3b-eagle3")}
    chains = {name: given for name, given in FIXED.items() if given != TREE}
    few: dict[str, Any] = {"batches": (1, 8, 32), "lengths": (256,), "fixed": chains, "at_once": 1}
    few |= {"falling": few["batches"], "fixed_batches": few["batches"], "of_low": True}  # so one engine has both
    found["9b"] = Case(hybrid | accepting(2.5, LOW[0]), **few, beside="9b")
    for name in ("30b", "30b-int4"):
        path = {"model_path": str(SHAPES / name.replace("30b", "qwen3-30b-a3b"))}
        found[name] = Case(mixture | path | accepting(2.5, LOW[0]), **few, beside=name)
    ngram, small = {"speculative_algorithm": "NGRAM"}, {"start_s": 10.0}
    found["eagle3-chat"] = Case(EAGLE3, "chat20", fixed=FIXED, **small)
    found |= {f"ngram-{kind}": Case(ngram, f"{kind}20", fixed=FIXED_NGRAM, **small) for kind in ("chat", "copy")}
    if heads is not None:
        standalone = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(heads / "standalone")}
        found["standalone-chat"] = Case(standalone, "chat20", batches=(1, 32, 128))
    return found


def accepting(*means: float, most: float = math.inf) -> dict[str, Any]:
    """The flag of synthetic acceptance; of numbers that cannot commit so much, as much as they can."""
    return {"speculative_simulate_acc_len": tuple(min(mean, most) for mean in means)}


def longest(given: Mapping[str, int]) -> int:
    """Tokens that a step of these numbers commits, at most."""
    return min(given["speculative_num_draft_tokens"], given["speculative_num_steps"] + 1)


def tiny_case(directory: str) -> dict[str, Case]:
    """A tiny model, for a CPU."""
    flags = tiny_flags(directory)
    kept = ("model_path", "speculative_draft_model_path", "load_format", "speculative_simulate_acc_len")
    small = {name: flags[name] for name in kept if name in flags}
    few: dict[str, Any] = {"batches": (1, 4), "lengths": (256, 512), "fixed": {"fixed 4": CHAIN}, "turns": (1, 4, 1)}
    high = Case(EAGLE3 | small | accepting(HIGH[0], LOW[0]), **few, falling=(4,), beside="tiny", of_low=True)
    return {"tiny": high, "tiny-1.3": Case(EAGLE3 | small | accepting(1.3), **few, beside="tiny")}


def prompts_of(case: Case, vocab_size: int) -> list[Tokens]:
    if case.prompts == RANDOM:
        return [ids[:PROMPT_TOKENS] for ids in random_prompts(max(case.batches), vocab_size)]
    return chat_prompts(config_from({}), load_prompts(case.prompts))


def bounds_of(cases: Iterable[Case], prompts: Iterable[Sequence[Tokens]]) -> dict[str, Any]:
    """What every engine of some cases has alike. Slots and graphs are those of a default server of so many requests."""
    longest = max(len(ids) for found in prompts for ids in found)
    longest += max(length for case in cases for length in case.lengths) + ROOM
    most = max(batch for case in cases for batch in case.batches)
    return {
        **{"log_level": "warning", "skip_tokenizer_init": True, "disable_radix_cache": True, "audit_rate": 0.0},
        **{"max_running_requests": most, "max_total_tokens": max(most * longest, CONTEXT_LENGTH)},
    }


def of_one_method(cases: Mapping[str, Case]) -> list[list[str]]:
    """Names of cases that share engines of fixed numbers: they have other acceptances or prompts."""
    found: dict[str, list[str]] = {}
    for name, case in cases.items():
        own = {flag: value for flag, value in case.flags.items() if flag not in accepting()}
        found.setdefault(repr((own, case.fixed)), []).append(name)
    return list(found.values())
