"""Further attacks by what takes long: stops, grammars, log-probs, texts (rules 4, 5, 6 and 11)."""

import asyncio
import json
from typing import Any

from support.attacks.attacker import Attacker
from support.attacks.case import EVERY_METHOD, Cases, all_the_same, answered, answered_or_refused, refused, unread
from support.attacks.findings import LETTER_A

WORK = Cases()


def letters(num_tokens: int, **more: Any) -> dict[str, Any]:
    """A request whose answer is as many 'a'."""
    return {"max_tokens": num_tokens, "ignore_eos": True, "allowed_token_ids": [LETTER_A], **more}


async def honest_letters(attacker: Attacker) -> str:
    return answered(await attacker.complete(**letters(150, n=4)))


@WORK.add(4, servers=EVERY_METHOD, honest=honest_letters, seconds=3)
async def alternatives_that_overlap(attacker: Attacker) -> str:
    patterns = ["(a|aa)+b", "(a*)*b", "((a+)+)+c", "(a|a)*d", "(?:a?){30}a{30}e", "(.*a.*)*f", "([ab]*a[ab]{12})+g"]
    reply = await attacker.complete(**letters(150, n=4, stop_regex=patterns))
    if reply.status == 200:
        assert [each["text"] for each in reply.json["choices"]] == ["a" * 150] * 4, reply.short()
    return answered_or_refused(reply, "stop_regex")


@WORK.add(4, servers=EVERY_METHOD, seconds=2)
async def what_no_automaton_can_do(attacker: Attacker) -> str:
    patterns = (
        r"(a)\1",
        "(?=a)b",
        "(?!a)b",
        "(?<!a)b",
        "(?<=a)b",
        "(?P<x>a)(?P=x)",
        "(?R)?a",
        "(?(1)a|b)",
        "(?|(a)|b)",
    )
    return all_the_same([refused(await attacker.complete(stop_regex=each), "stop_regex") for each in patterns])


async def honest_streams(attacker: Attacker) -> str:
    return answered(await attacker.complete(**letters(60, n=48)))


@WORK.add(4, servers=EVERY_METHOD, honest=honest_streams)
async def sixteen_counted_patterns_of_48_choices(attacker: Attacker) -> str:
    patterns = [f"(?:[a-z]{{1,40}}[0-9]){{1,20}}x{i}|a{{1,90}}[^a]{{1,90}}{i}" for i in range(16)]
    reply = await attacker.complete(**letters(60, n=48, stop_regex=patterns))
    if reply.status == 200:
        assert [each["text"] for each in reply.json["choices"]] == ["a" * 60] * 48, reply.short()
    return answered_or_refused(reply, "stop_regex")


async def honest_streams_of_two_letters(attacker: Attacker) -> str:
    return answered(await attacker.complete(**letters(200, n=48, allowed_token_ids=[LETTER_A, LETTER_A + 1])))


@WORK.add(4, servers=EVERY_METHOD, honest=honest_streams_of_two_letters)
async def pattern_at_its_limit_whose_states_never_repeat(attacker: Attacker) -> str:
    given = letters(200, n=48, allowed_token_ids=[LETTER_A, LETTER_A + 1], temperature=1.0)
    reply = await attacker.complete(**given, stop_regex="[ab]{1,490}a[ab]{1,490}c")
    assert [len(each["text"]) for each in reply.json["choices"]] == [200] * 48, reply.short()
    return answered(reply)


@WORK.add(4, servers=EVERY_METHOD, honest=honest_letters, seconds=3)
async def sixteen_stop_strings_of_1_000_letters(attacker: Attacker) -> str:
    stops = ["a" * (984 + i) + "b" for i in range(15)] + ["b" + "a" * 900]
    reply = await attacker.complete(**letters(150, n=4, stop=stops))
    outcome = answered(reply)
    assert [each["text"] for each in reply.json["choices"]] == ["a" * 150] * 4, reply.short()
    return outcome


GRAMMAR_S = 2.0  # for the victim's own grammar, which waits for its turn


@WORK.add(5, servers=EVERY_METHOD, poll="grammar", poll_s=GRAMMAR_S)
async def enums_of_20_000_values(attacker: Attacker) -> str:
    schemas = [json.dumps({"enum": [f"{seed}v{i}" for i in range(20_000)]}) for seed in range(4)]
    replies = await asyncio.gather(*(attacker.complete(max_tokens=4, json_schema=each) for each in schemas))
    return all_the_same([answered_or_refused(reply, "json_schema") for reply in replies])


@WORK.add(5, servers=EVERY_METHOD, poll="grammar", poll_s=GRAMMAR_S)
async def references_that_double(attacker: Attacker) -> str:
    replies = await asyncio.gather(
        *(
            attacker.complete(max_tokens=4, json_schema=json.dumps(doubling(word, "properties", 40)))
            for word in ("one", "two")
        ),
        *(attacker.complete(max_tokens=4, json_schema=json.dumps(doubling(word, "allOf", 24))) for word in ("x", "y")),
    )
    return all_the_same([answered_or_refused(reply, "json_schema") for reply in replies])


def doubling(word: str, by: str, depth: int) -> dict[str, Any]:
    """Definitions each of which refers to the one before twice."""
    definitions: dict[str, Any] = {"d0": {"type": "string", "maxLength": 9}}
    for i in range(1, depth):
        refs = [{"$ref": f"#/$defs/d{i - 1}"}] * 2
        if by == "allOf":
            definitions[f"d{i}"] = {"allOf": refs}
        else:
            names = {f"{word}a": refs[0], f"{word}b": refs[1]}
            definitions[f"d{i}"] = {"type": "object", "properties": names, "required": [*names]}
    return {"$ref": f"#/$defs/d{depth - 1}", "$defs": definitions}


@WORK.add(5, servers=EVERY_METHOD, poll="grammar", poll_s=GRAMMAR_S)
async def nested_repeats_of_rules(attacker: Attacker) -> str:
    bodies: list[dict[str, Any]] = [
        {"ebnf": 'root ::= (("a"{1,1000}){1,1000}){1,1000} "b"'},
        {"regex": "(?:(?:[a-z]{1,900}[0-9]){1,900}x){1,900}"},
        {"regex": "|".join(f"[a-z]{{1,{300 + i}}}{i}" for i in range(40))},
        {"json_schema": json.dumps({"type": "string", "pattern": "^(([ab]*a[ab]{20})|([bc]*c[bc]{20}))$"})},
    ]
    replies = await asyncio.gather(*(attacker.complete(max_tokens=4, **body) for body in bodies))
    named = zip(replies, bodies, strict=True)
    return all_the_same([answered_or_refused(reply, next(iter(body))) for reply, body in named])


async def honest_prompt(attacker: Attacker) -> str:
    return answered(await attacker.complete(prompt=unread("world " * 7000)))


@WORK.add(6, servers=EVERY_METHOD, honest=honest_prompt, least_s=0.5, answer_mib=200)
async def native_log_probs_of_a_long_prompt(attacker: Attacker) -> str:
    body = {"text": "world " * 7000, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    body |= {"token_ids_logprob": [*range(100, 132)], "sampling_params": {"max_new_tokens": 1}}
    reply = await attacker.post("/generate", body)
    outcome = answered(reply)
    assert len(reply.json["meta_info"]["input_token_logprobs"]) >= 7000
    return outcome


@WORK.add(6, servers=EVERY_METHOD, seconds=2)
async def log_probs_of_128_long_choices(attacker: Attacker) -> str:
    return refused(await attacker.complete(n=128, max_tokens=8000, ignore_eos=True, logprobs=20), "logprobs")


async def honest_choices(attacker: Attacker) -> str:
    return answered(await attacker.complete(prompt=unread("sky " * 2000), n=16, max_tokens=16, ignore_eos=True))


@WORK.add(6, servers=EVERY_METHOD, honest=honest_choices, least_s=0.5, answer_mib=200)
async def log_probs_of_prompts_of_16_choices(attacker: Attacker) -> str:
    body = {"prompt": "sky " * 2000, "n": 16, "max_tokens": 16, "ignore_eos": True, "echo": True, "logprobs": 20}
    reply = await attacker.complete(**body)
    outcome = answered(reply)
    found = [len(each["logprobs"]["token_logprobs"]) for each in reply.json["choices"]]
    assert len(found) == 16 and min(found) >= 2016, found
    return outcome


async def honest_prompts(attacker: Attacker) -> str:
    replies = await asyncio.gather(*(attacker.complete(prompt=unread(f"{i} " * 750)) for i in range(8)))
    return all_the_same([answered(reply) for reply in replies])


@WORK.add(6, honest=honest_prompts, least_s=0.5, answer_mib=200)
async def eight_long_answers_at_once(attacker: Attacker) -> str:
    """Each of them is written in turns, and so are all of them together."""
    bodies = [{"prompt": f"{i} " * 750, "echo": True, "logprobs": 20} for i in range(8)]
    replies = await asyncio.gather(*(attacker.complete(**body) for body in bodies))
    outcomes = [answered(reply) for reply in replies]
    assert all(len(reply.json["choices"][0]["logprobs"]["token_logprobs"]) >= 1500 for reply in replies)
    return all_the_same(outcomes)


async def one_fresh_text(attacker: Attacker) -> str:
    await attacker.post("/tokenize", {"prompt": "b" * 600_000})
    return ""


@WORK.add(11, servers=("plain", "ngram"), seconds=14, honest=one_fresh_text)
async def a_tokenizer_that_is_never_idle(attacker: Attacker) -> str:
    """Longer than the ten seconds after which a silent frontend is asked for."""

    async def send() -> str:
        outcome = ""
        async for _ in attacker.for_seconds():
            reply = await attacker.post("/tokenize", {"prompt": "b" * 600_000})
            outcome = answered_or_refused(reply, "prompt")
        return outcome

    return all_the_same(await asyncio.gather(*(send() for _ in range(6))))


@WORK.add(11, servers=("eagle3",), seconds=14)
async def long_conversations_all_the_time(attacker: Attacker) -> str:
    body = {"messages": [{"role": "user", "content": "x y z " * 20}] * 20_000, "max_tokens": 1}

    async def send() -> str:
        async for _ in attacker.for_seconds():
            outcome = refused(await attacker.post("/v1/chat/completions", body), "messages")
        return outcome

    return all_the_same(await asyncio.gather(*(send() for _ in range(3))))
