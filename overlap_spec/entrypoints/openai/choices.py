"""Several answers to each prompt: `n` choices, numbered prompt by prompt, or the best n of `best_of` candidates.

    prompts p, q   n = 2   ->   index 0: p    1: p after 0    2: q    3: q after 2

A prompt's first choice computes it; the others start when its first token has come, and find the prompt in the prefix
cache. Choice 0 draws with the request's seed, so it is the answer that a request for one choice would get. Candidates
are choices as well: those that a request for n = `best_of` would get.
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from overlap_spec.client.log_probs import TokenLogProb, own_log_probs
from overlap_spec.config import MIB
from overlap_spec.entrypoints.http.body_fields import MAX_PROMPTS
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import Collected, EngineRequest
from overlap_spec.messages import Prompt, SamplingParams

MOST_CHOICES = 128  # OpenAI's
MOST_OF_ANSWERS = 64 * MIB  # of the lists and grammars of all answers to a request
BIAS_BYTES, WORD_BYTES = 40, 80  # about what a bias takes in a process, and a bad word of 2 x 8 tokens in a message
SUMMED_AT_ONCE = 1 << 15


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of a prompt's choice `index`. Without a seed the engine draws one for each choice."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def check_choices(n: int, num_prompts: int, field: str = "n") -> None:
    """Raises: Problem if so many answers cannot be asked for. `field`: the one that asks for them."""
    if not 1 <= n <= MOST_CHOICES:
        raise Problem(400, f"{field} must be from 1 to {MOST_CHOICES}, got {n}", field, "invalid_value")
    if n * num_prompts > MAX_PROMPTS:
        text = f"{field}: at most {MAX_PROMPTS} answers in one request, got {num_prompts} prompts of {n} choices"
        raise Problem(400, text, field, "invalid_value")


def check_best_of(best_of: int, n: int, num_prompts: int, streams: bool) -> None:
    """Raises: Problem if the best n of so many answers cannot be asked for."""
    if best_of < n:
        raise Problem(400, f"best_of must be at least n, which is {n}, got {best_of}", "best_of", "invalid_value")
    if best_of > n and streams:
        text = "best_of: which answers are best is known at the end; leave out stream, or send a best_of that is n"
        raise Problem(400, text, "best_of", "invalid_value")
    check_choices(best_of, num_prompts, "best_of")


async def best_answers(answers: Sequence[Collected], best_of: int, n: int) -> list[Collected]:
    """The n answers to each prompt with the highest mean log-prob of their tokens, best first; of equals the first.

    `answers`: `best_of` of each prompt, with log-probs if some are left out. Cancellation: safe.
    """
    if best_of == n:
        return list(answers)
    ranked = [(await _mean_log_prob(answer.log_probs), answer) for answer in answers]
    groups = (ranked[start : start + best_of] for start in range(0, len(ranked), best_of))
    best = (sorted(group, key=lambda each: each[0], reverse=True)[:n] for group in groups)
    return [answer for group in best for _, answer in group]


async def _mean_log_prob(entries: Sequence[TokenLogProb]) -> float:
    """Of the tokens that would be returned; an answer without tokens comes last. Others take turns with the sums."""
    sums: list[float] = []
    for first in range(0, len(entries), SUMMED_AT_ONCE):
        sums.append(math.fsum(own_log_probs(entries, first, first + SUMMED_AT_ONCE)))
        await asyncio.sleep(0)
    mean = math.fsum(sums) / len(entries) if entries else -math.inf
    return -math.inf if math.isnan(mean) else mean


def spread(
    ids: Sequence[str],
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    names: Mapping[str, str],
    n: int,
    seeds: Sequence[int | None] = (),
) -> list[EngineRequest]:
    """The requests of all choices. `ids` are one for each choice, the others one for each prompt.

    `seeds`: instead of those of `sampling`, where they are not None; so requests that differ in nothing else share one
    object.
    """
    requests = []
    for number, request_id in enumerate(ids):
        prompt, index = divmod(number, n)
        seed = seeds[prompt] if seeds and seeds[prompt] is not None else sampling[prompt].seed
        seed = choice_seed(seed, index)
        first = ids[prompt * n] if index else ""
        requests.append(EngineRequest(request_id, prompts[prompt], sampling[prompt], names, first, seed))
    _check_product(sampling, names, n)
    return requests


def _check_product(sampling: Sequence[SamplingParams], names: Mapping[str, str], n: int) -> None:
    """Raises: Problem if what the engine keeps of all answers' lists and grammars is too much, naming the largest."""
    counts = Counter(map(id, sampling))
    distinct = {id(each): each for each in sampling}
    if len(sampling) * n == 1 or not any(each.has_lists or each.grammar for each in distinct.values()):
        return  # as of most
    sizes = {key: _sizes(each) for key, each in distinct.items()}
    total = n * sum(counts[key] * sum(fields.values()) for key, fields in sizes.items())
    if total > MOST_OF_ANSWERS:
        size, field = max((size, field) for fields in sizes.values() for field, size in fields.items())
        name, num_answers = names.get(field, field), n * len(sampling)
        each = f"{name}: {size} bytes for each of {num_answers} answers"
        text = f"{each}: {total} in all, at most {MOST_OF_ANSWERS} are taken"
        raise Problem(400, text, name, "invalid_value")


def _sizes(sampling: SamplingParams) -> dict[str, int]:
    """Bytes that each answer takes of the engine's links, by the field that they come from."""
    return {
        "grammar": 0 if sampling.grammar is None else sampling.grammar.num_bytes,
        "allowed_token_ids": len(sampling.allowed_ids),
        "logit_bias": BIAS_BYTES * len(sampling.logit_bias),
        "bad_words": WORD_BYTES * len(sampling.bad_words),
    }


def numbered(name: str, count: int, batched: bool) -> list[str]:
    """The ids of a group's requests: the group's own for the only one, else with a number."""
    return [f"{name}_{index}" for index in range(count)] if batched else [name]
