"""The twenty attacks that worked once, as they were found, and what each comes to now."""

import asyncio
import json
import os
import stat
import tempfile
from pathlib import Path

from overlap_spec import SamplingParams
from overlap_spec.client.link import pack_ids
from overlap_spec.features.audit.transcripts import FaultFile, Transcript
from overlap_spec.messages import Admit, Cancel, Generate, Rejected, Terms, TextDeltas, TokenPrompt
from support.attacks.attacker import Attacker, Reply
from support.attacks.case import EVERY_METHOD, Cases, all_the_same, answered, answered_or_refused, refused, unread
from support.attacks.servers import ADMIN_KEY, VOCABULARY
from support.attacks.zmtp import more_frames

FINDINGS = Cases()
HASHES, LETTER_A = 45855, 81  # token ids: 80 '#', 'a'


@FINDINGS.add(4, finding=1, servers=EVERY_METHOD, seconds=2)
async def stop_regex_of_nested_repeats(attacker: Attacker) -> str:
    outcomes = []
    for pattern in ("(?:(?:(?:(?:a?){1000}){1000}){1000}){1000}b", "(?:a{65535}){65535}"):
        outcomes.append(refused(await attacker.complete(max_tokens=4, stop_regex=pattern), "stop_regex"))
    return all_the_same(outcomes)


@FINDINGS.add(2, finding=2, seconds=2)
async def chunks_of_one_byte_without_a_key(attacker: Attacker) -> str:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    closed = 0
    async for _ in attacker.for_seconds():
        async with attacker.connection() as connection:
            alive = await connection.send(head)
            for _ in range(10):
                alive = alive and await connection.send(b"1\r\n \r\n" * 40_000)
            assert await connection.is_closed_within(15), "the connection stays open"
            closed += 1
    assert closed
    return "the connection closed"


@FINDINGS.add(1, finding=3, seconds=2)
async def body_for_a_quadratic_expression(attacker: Attacker) -> str:
    body = b'{"prompt":[' + b"[" * 131_080 + b" " * 60_000 + b'\\"' * 40_000
    reply = await attacker.post("/v1/completions", body)
    assert reply.status == 400, reply.short()
    return "400"


@FINDINGS.add(3, finding=4, seconds=2, bounds_peak=True)
async def long_stop_string_of_many_prompts(attacker: Attacker) -> str:
    body = {"prompt": ["x"] * 500, "max_tokens": 1, "stop": ["z" * 3_000_000]}
    return refused(await attacker.post("/v1/completions", body), "stop", "1,000")


@FINDINGS.add(5, finding=5, servers=EVERY_METHOD, poll="grammar", poll_s=2.0, seconds=3)
async def schemas_that_do_not_compile(attacker: Attacker) -> str:
    replies = await asyncio.gather(*(attacker.complete(max_tokens=2, json_schema=slow_schema(i)) for i in range(2)))
    return all_the_same([refused(reply, "json_schema") for reply in replies])


def slow_schema(number: int) -> str:
    """Patterns whose conjunction has a large automaton."""
    patterns = [{"type": "string", "pattern": f".*a{i}{number}.*"} for i in range(40)]
    return json.dumps({"allOf": patterns})


LONG_STOPS = ["c" * 400_000 + str(i) for i in range(15)] + ["#" * 500_000]


@FINDINGS.add(4, finding=6, servers=EVERY_METHOD, seconds=2)
async def stop_strings_of_400_000_characters(attacker: Attacker) -> str:
    body = {"max_tokens": 1500, "ignore_eos": True, "allowed_token_ids": [HASHES], "stop": LONG_STOPS}
    return refused(await attacker.complete(**body), "stop", "1,000")


@FINDINGS.add(3, finding=7, seconds=2, bounds_peak=True)
async def bad_word_of_8_million_characters(attacker: Attacker) -> str:
    return refused(await attacker.complete(bad_words=["a" * 7_900_000]), "bad_words")


async def forty_choices(attacker: Attacker) -> str:
    """Shorter than the attack's, whose steps are no longer for it."""
    return answered(await attacker.complete(**FORTY_CHOICES | {"max_tokens": 30}))


FORTY_CHOICES = {"max_tokens": 120, "n": 40, "ignore_eos": True, "allowed_token_ids": [LETTER_A]}


@FINDINGS.add(4, finding=8, servers=EVERY_METHOD, honest=forty_choices, seconds=2)
async def slow_stop_regexes_of_forty_choices(attacker: Attacker) -> str:
    reply = await attacker.complete(**FORTY_CHOICES, stop_regex=["a{1,200}a{1,60}[bc]"] * 16)
    if reply.status != 200:
        return refused(reply, "stop_regex")
    assert [each["text"] for each in reply.json["choices"]] == ["a" * 120] * 40, reply.short()
    return "its answer"


@FINDINGS.add(5, finding=9, servers=EVERY_METHOD)
async def regexes_that_are_kept(attacker: Attacker) -> str:
    replies: list[Reply] = []
    async for _ in attacker.for_seconds():
        pattern = f"(a{{{990 - len(replies)}}}){{1000}}b{{1}}"
        replies.append(await attacker.complete(max_tokens=2, regex=pattern))
    return all_the_same([answered_or_refused(reply, "regex") for reply in replies])


@FINDINGS.add(7, finding=10, victim_rid="job-1", poll="named", seconds=2)
async def another_keys_request_by_id(attacker: Attacker) -> str:
    """The victim streams as `job-1`, which it must go on with, and its `nightly` requests must be answered."""
    async with attacker.stream(max_tokens=4000, ignore_eos=True, rid="nightly") as kept:
        assert kept.status_code == 200, await kept.aread()
        async for _ in attacker.for_seconds():
            await attacker.post("/abort_request", {"rid": "job-1"})
            answered(await attacker.complete(rid="job-1"))
            async with attacker.dealer() as dealer:
                dealer.send(Cancel("job-1", everyone=True))
                dealer.send(Cancel("job-1", everyone=False))
                await asyncio.sleep(0.05)
    return "nothing"


@FINDINGS.add(7, finding=11, seconds=2)
async def flush_path_with_a_newline(attacker: Attacker) -> str:
    for path in ("/flush_cache%0A", "/flush_cache%0D", "/flush_cache/", "/reset_prefix_cache%0a"):
        for reply in (await attacker.post(path, b""), await attacker.get(path)):
            kept_out = reply.status in (307, 403, 404, 405) or reply.error.get("code") == "invalid_path"
            assert kept_out, f"{path}: {reply.short()}"
    return refused(await attacker.post("/flush_cache", b""), "", "--admin-api-key", status=403)


async def long_prompt(attacker: Attacker) -> str:
    return answered(await attacker.complete(prompt=unread("hello " * 7000)))


@FINDINGS.add(6, finding=12, servers=EVERY_METHOD, honest=long_prompt, least_s=0.5, answer_mib=150, seconds=2)
async def log_probs_of_a_long_prompt(attacker: Attacker) -> str:
    reply = await attacker.complete(prompt="hello " * 7000, echo=True, logprobs=20)
    outcome = answered(reply)
    found = reply.json["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) >= 7001, len(found["token_logprobs"])
    assert found["token_logprobs"][0] is None and all(each <= 0 for each in found["token_logprobs"][1:])
    return outcome


@FINDINGS.add(9, finding=13, seconds=2)
async def unfinished_and_endless_messages(attacker: Attacker) -> str:
    host, port = attacker.zmq_address
    key = attacker.server.key("attacker")
    sent = await asyncio.to_thread(more_frames, host, port, key, 60, 20 << 20, 3.0)
    outcome = await attacker.send_frames([b"\xc1"] * 1_000_000)
    assert sent < 60, "all 60 frames of 20 MiB were taken"
    return outcome


@FINDINGS.add(9, finding=14, servers=("small",), seconds=2)
async def forged_owners(attacker: Attacker) -> str:
    """The victim has eight requests open, less than its half of the queue, and loses none to one that names others."""
    key = attacker.server.key("victim")
    body = {"max_tokens": 40, "ignore_eos": True}
    theirs = [asyncio.create_task(attacker.post("/v1/completions", {"prompt": "x", **body}, key=key)) for _ in range(8)]
    await asyncio.sleep(0.3)
    async with attacker.dealer() as dealer:
        for i in range(40):
            terms, params = Terms(client=f"forged {i}"), SamplingParams(max_new_tokens=40, ignore_eos=True)
            dealer.send(Generate(f"forged-{i}", TokenPrompt(pack_ids([5, 6])), params, terms))
        statuses = [reply.status for reply in await asyncio.gather(*theirs)]
        assert statuses == [200] * 8, statuses
        outcomes = await _ends_of(dealer, 40)
    return outcomes


async def _ends_of(dealer: object, number: int) -> str:
    """Of requests over ZMQ: how they end."""
    outcomes: list[str] = []
    async with asyncio.timeout(60):
        while len(outcomes) < number:
            match await dealer.recv():
                case TextDeltas() as deltas:
                    outcomes += ["its answer" for finish in deltas.finishes if finish is not None]
                case Rejected() as refusal:
                    outcomes.append(refusal.code.name.lower())
    return all_the_same(outcomes)


BROWSER = {"content-type": "text/plain"}
PAGE = {**BROWSER, "origin": "https://evil.example"}
REBOUND = {**BROWSER, "host": "evil.example"}


@FINDINGS.add(8, finding=15, servers=("open",), seconds=2)
async def web_page_against_a_local_server(attacker: Attacker) -> str:
    bodies = {"/v1/completions": {"prompt": "x", "max_tokens": 1}, "/abort_request": {"abort_all": True}}
    for path, body in bodies.items():
        refused(await attacker.post(path, body, headers=PAGE), "", "--cors-allow-origins", status=403)
        refused(await attacker.post(path, body, headers=REBOUND), "", "--allowed-hosts", status=403)
    for path in ("/flush_cache", "/server_info", "/v1/models"):
        reply = await attacker.get(path, headers={"host": "evil.example"})
        assert reply.status in (403, 405), f"{path}: {reply.short()}"
    plain = await attacker.get("/flush_cache")  # as an <img> of a page asks for it, without an Origin
    assert plain.status in (403, 405), plain.short()
    return answered(await attacker.complete(max_tokens=1)).replace("its answer", "403; an honest client its answer")


BOMBS = (
    "{{ '%999999999d' % 1 }}",
    "{{ '%300000000d'|format(1)|length }}",
    "{{ 'a'|center(900000000) }}",
    "{{ ([1]|batch(100000000,0)|list)|length }}",
    "{{ lipsum(n=200000) }}",
)


@FINDINGS.add(5, finding=16, servers=("small",), seconds=2, bounds_peak=True)
async def templates_that_fill_memory(attacker: Attacker) -> str:
    outcomes = []
    for template in BOMBS:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template": template}
        outcomes.append(refused(await attacker.post("/v1/chat/completions", body), "chat_template"))
    return all_the_same(outcomes)


async def one_long_text(attacker: Attacker) -> str:
    for _ in range(3):
        await attacker.post("/v1/completions", LONG_TEXT)
    return ""


TURNS_S = 2.0  # for a text of 36 kB, whose pieces wait for their turns beside such texts
LONG_TEXT = json.dumps({"prompt": "a" * 600_000, "max_tokens": 1}).encode()


@FINDINGS.add(6, finding=17, poll="tokenize", honest=one_long_text, poll_s=TURNS_S, seconds=2)
async def eighty_long_texts(attacker: Attacker) -> str:
    """The first 50 fit into what one client may have waiting: they are refused for what they are."""
    replies = await asyncio.gather(*(attacker.post("/v1/completions", LONG_TEXT) for _ in range(80)))
    late = [reply for reply in replies if reply.status == 503 and reply.error.get("code") == "overloaded"]
    assert len(late) <= 30, f"{len(late)} were sent away: {late[0].short()}"
    outcomes = [refused(reply, "prompt") for reply in replies if reply not in late]
    return all_the_same(outcomes) + ("; 503 for what is too much at once" if late else "")


async def eight_choices(attacker: Attacker) -> str:
    return answered(await attacker.complete(n=8, allowed_token_ids=[7] * 1000))


@FINDINGS.add(3, finding=18, seconds=2, honest=eight_choices, bounds_peak=True)
async def a_million_allowed_tokens(attacker: Attacker) -> str:
    refused(await attacker.complete(n=8, allowed_token_ids=[7] * 100_000), "allowed_token_ids", str(VOCABULARY))
    return refused(await attacker.complete(n=8, allowed_token_ids=[7] * 1_000_000), "allowed_token_ids", "262144")


@FINDINGS.add(10, finding=19, seconds=2)
async def numbers_of_5_000_digits(attacker: Attacker) -> str:
    long = "1" * 5000
    reply = await attacker.post("/v1/completions", {"prompt": "x"}, headers={"x-speculative-num-steps": long})
    first = refused(reply, "speculative", status=400)
    refused(await attacker.get(f"/ui/timeline?steps={long}", key=ADMIN_KEY), "steps", status=400)
    return first


@FINDINGS.add(10, finding=20, servers=("small",), seconds=2)
async def files_that_others_read(attacker: Attacker) -> str:
    """The server of this kind has a key file of mode 0644."""
    keys = attacker.service.tmp_path / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o644
    assert attacker.service.logs(str(keys), timeout_s=1), "no warning names the key file that others can read"
    with tempfile.TemporaryDirectory() as directory:
        await asyncio.to_thread(_write_a_fault, Path(directory, "audit", "faults.jsonl"))
        file = Path(directory, "audit", "faults.jsonl")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, oct(file.stat().st_mode)
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700, oct(file.parent.stat().st_mode)
    return "a warning; files of mode 0600"


def _write_a_fault(path: Path) -> None:
    transcript = Transcript("r", Admit(1, pack_ids([7, 8, 9]), SamplingParams(), (), 0.0))
    old = os.umask(0o022)
    try:
        FaultFile(str(path)).write(transcript, [])
    finally:
        os.umask(old)
