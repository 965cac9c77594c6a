"""Several answers to each prompt: `n` choices, numbered prompt by prompt.

    prompts p, q   n = 2   ->   index 0: p    1: p after 0    2: q    3: q after 2

A prompt's first choice computes it; the others start when its first token has come, and find the prompt in the prefix
cache. Choice 0 draws with the request's seed, so it is the answer that a request for one choice would get.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from overlap_spec.messages import Prompt, SamplingParams
from overlap_spec.server.problems import Problem
from overlap_spec.server.prompts import MAX_PROMPTS
from overlap_spec.server.running import EngineRequest

MOST_CHOICES = 128  # OpenAI's


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of a prompt's choice `index`. Without a seed the engine draws one for each choice."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def check_choices(n: int, num_prompts: int) -> None:
    """Raises: Problem if so many answers cannot be asked for."""
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(400, f"n must be from 1 to {MOST_CHOICES}, got {n}", "n", "invalid_value")
    if n * num_prompts > MAX_PROMPTS:
        text = f"n: at most {MAX_PROMPTS} answers in one request, got {num_prompts} prompts of {n} choices"
        raise Problem(400, text, "n", "invalid_value")


def check_best_of(best_of: int | None, n: int) -> None:
    """Raises: Problem if choices would have to be ranked."""
    if best_of not in (None, n):
        text = f"best_of must be n, which is {n}: choices are not ranked here; ask for n and choose among them"
        raise Problem(400, text, "best_of", "invalid_value" if best_of is not None and best_of < n else "unsupported")


def spread(
    ids: Sequence[str],
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    names: Mapping[str, str],
    n: int,
) -> list[EngineRequest]:
    """The requests of all choices. `ids` are one for each choice, the others one for each prompt."""
    requests = []
    for number, request_id in enumerate(ids):
        prompt, index = divmod(number, n)
        params = sampling[prompt]
        if index:
            params = msgspec.structs.replace(params, seed=choice_seed(params.seed, index))
        first = ids[prompt * n] if index else ""
        requests.append(EngineRequest(request_id, prompts[prompt], params, names, first))
    return requests


def numbered(name: str, count: int, batched: bool) -> list[str]:
    """The ids of a group's requests: the group's own for the only one, else with a number."""
    return [f"{name}_{index}" for index in range(count)] if batched else [name]
