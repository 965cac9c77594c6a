"""Keys of a TCP endpoint, as the client meets them: what each opens, ends and reads, and whose requests are whose."""

import asyncio
from pathlib import Path

import pytest
from support.client_harness import Stage, most, with_engine
from support.installed import needs_feature

from overlap_spec.client import Client
from overlap_spec.errors import ActorDied, RequestAborted, RequestError
from overlap_spec.messages import Generate, Terms, TextPrompt

KEYS = {"api_key": "ko", "key_names": {"ka": "alice", "ka2": "alice", "kb": "bob"}, "admin_key": "ko"}


def owners(stage: Stage) -> set[tuple[str, str, str]]:
    return {(request.owner, request.terms.key, request.name) for request in stage.service._requests}


@pytest.mark.parametrize(("key", "welcome"), [("secret", True), ("wrong", False)])
def test_a_tcp_endpoint_asks_for_the_key(tmp_path: Path, key: str, welcome: bool) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client(key) as client:
            if welcome:
                assert (await client.complete("one two", most(2))).text == "one two"
            else:
                with pytest.raises(ActorDied, match="API key"):
                    await client.wait_ready(0.3)

    with_engine(story, tmp_path, client_endpoint="tcp://127.0.0.1:*", api_key="secret")


def test_any_key_opens_a_tcp_endpoint_and_the_operators_key_ends_all(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client("ka") as alice, stage.client("ko") as operator:
            assert (await alice.complete("one two", most(2))).text == "one two"
            running = asyncio.create_task(alice.complete("for ever", most(3000)))
            await stage.until(lambda: bool(stage.scheduler.running))
            await alice.cancel("", everyone=True)
            with pytest.raises(RequestError, match="needs the key of --admin-api-key"):
                await alice.flush_cache()
            assert len(stage.service._requests) == 1, "the request goes on"
            await operator.cancel("", everyone=True)
            with pytest.raises(RequestAborted):
                await running
            assert await operator.flush_cache()
        async with stage.client("kc") as stranger:
            with pytest.raises(ActorDied, match="API key"):
                await stranger.wait_ready(0.3)

    with_engine(story, tmp_path, client_endpoint="tcp://127.0.0.1:*", **KEYS)


def test_ids_belong_to_the_key_that_gave_them_and_only_the_operator_reaches_those_of_others(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client("ka") as alice, stage.client("kb") as bob, stage.client("ko") as operator:
            alices = asyncio.create_task(alice.complete("for ever", most(3000), "nightly"))
            bobs = asyncio.create_task(bob.complete("for ever", most(3000), "nightly"))
            await stage.until(lambda: len(stage.scheduler.running) == 2)
            assert owners(stage) == {("key alice", "alice", "nightly"), ("key bob", "bob", "nightly")}
            await bob.cancel("nightly", everyone=True, of_key="alice")  # a key cannot choose whose
            with pytest.raises(RequestAborted):
                await bobs
            await stage.until(lambda: len(stage.scheduler.running) == 1)
            await bob.cancel("", everyone=True, of_key="alice")
            assert len(stage.scheduler.running) == 1, "alice's goes on"
            async with stage.client("ka2") as same_key:
                await same_key.cancel("nightly", everyone=True)
                with pytest.raises(RequestAborted):
                    await alices
            again = [asyncio.create_task(each.complete("for ever", most(3000), "x")) for each in (alice, bob)]
            await stage.until(lambda: len(stage.scheduler.running) == 2)
            await operator.cancel("x", everyone=True)
            assert [type(each) for each in await asyncio.gather(*again, return_exceptions=True)] == [RequestAborted] * 2

    with_engine(story, tmp_path, client_endpoint="tcp://127.0.0.1:*", **KEYS)


@needs_feature("audit")
def test_only_the_operator_reads_the_audit(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.client("kb") as bob, stage.client("ko") as operator:
            with pytest.raises(RequestError, match="needs the key of --admin-api-key"):
                await bob.audit()
            assert (await operator.audit()).figures.requests == 0

    with_engine(story, tmp_path, client_endpoint="tcp://127.0.0.1:*", **KEYS)


def test_a_plain_key_cannot_pass_for_many_clients_and_a_gateway_names_its_own(tmp_path: Path) -> None:
    """Else its requests would take turns as those of many, and the places of others in the queue."""

    async def story(stage: Stage) -> None:
        async with stage.client("kb") as bob, stage.client("ko") as gateway, Client(stage.private) as server:
            forged = [Terms(client=f"forged {i}", key=f"unknown {i}") for i in range(3)]
            tasks = [asyncio.create_task(bob.complete("for ever", most(3000), terms=terms)) for terms in forged]
            await stage.until(lambda: len(stage.scheduler.running) == 3)
            assert {owner[:2] for owner in owners(stage)} == {("key bob", "bob")}
            named = Terms(client="key alice", key="alice")
            for each in (gateway, server):
                tasks.append(asyncio.create_task(each.complete("for ever", most(3000), "alice\nx", named)))
            await stage.until(lambda: len(stage.scheduler.running) == 5)
            assert ("key alice", "alice", "x") in owners(stage)
            await server.cancel("x", everyone=True)  # of every key: without the operator's
            await server.cancel("x", everyone=True, of_key="bob")
            await server.stats()
            assert len(stage.service._requests) == 5
            await server.cancel("x", everyone=True, of_key="alice")
            await stage.until(lambda: len(stage.scheduler.running) == 3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with_engine(story, tmp_path, client_endpoint="tcp://127.0.0.1:*", **KEYS)


def test_a_salt_is_the_clients_own_whatever_its_key(tmp_path: Path) -> None:
    """Alone, and of requests that are sent together."""

    async def story(stage: Stage) -> None:
        async with stage.client("kb") as bob, bob.together() as group:
            alone = asyncio.create_task(bob.complete("for ever", most(3000), terms=Terms(cache_salt="x")))
            of_group = [Generate(f"g{i}", TextPrompt("the same"), most(3000), Terms(cache_salt="y")) for i in range(3)]
            await group.start(of_group)
            await stage.until(lambda: len(stage.scheduler.running) == 4)
            salts = [admit.salt for admit, _ in stage.scheduler.running.values()]
            assert sorted(salts) == ["x", "y", "y", "y"]
            alone.cancel()
            await asyncio.gather(alone, return_exceptions=True)

    with_engine(story, tmp_path, client_endpoint="tcp://127.0.0.1:*", **KEYS)
