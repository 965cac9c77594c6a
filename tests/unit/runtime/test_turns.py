"""Turns: how many at once, whose is next, and places that are given up."""

import asyncio
from collections.abc import Sequence

import pytest

from overlap_spec.runtime.turns import Turns


async def order_of(asked: Sequence[str], num_at_once: int = 1) -> list[str]:
    """The order in which pieces of work are done that were asked for in this one while another was in progress."""
    turns: Turns[str] = Turns(num_at_once)
    done: list[str] = []

    async def work(name: str) -> None:
        async with turns.turn(name[0]):
            done.append(name)
            await asyncio.sleep(0)

    async with turns.turn("first"):
        tasks = [asyncio.create_task(work(name)) for name in asked]
        await asyncio.sleep(0)
        assert len(done) <= num_at_once
    await asyncio.gather(*tasks)
    return done


def test_owners_take_turns() -> None:
    asked = ["a1", "a2", "a3", "b1", "a4", "c1", "b2"]
    assert asyncio.run(order_of(asked)) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_no_more_at_once_than_said() -> None:
    async def story() -> int:
        turns: Turns[str] = Turns(3)
        running, most = 0, 0

        async def work(owner: str) -> None:
            nonlocal running, most
            async with turns.turn(owner):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.001)
                running -= 1

        await asyncio.gather(*[work("ab"[index % 2]) for index in range(20)])
        return most

    assert asyncio.run(story()) == 3


@pytest.mark.parametrize("granted", [False, True])
def test_a_place_that_is_given_up_is_free(granted: bool) -> None:
    async def story() -> None:
        turns: Turns[str] = Turns(1)

        async def hold(owner: str) -> None:
            async with turns.turn(owner):
                await asyncio.sleep(60)

        first, second = asyncio.create_task(hold("a")), asyncio.create_task(hold("b"))
        await asyncio.sleep(0)
        assert turns.of("b") == 1 and turns.of("a") == 0
        if granted:  # the turn comes and is given up before the owner has run
            first.cancel()
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        async with asyncio.timeout(1), turns.turn("c"):
            assert turns.of("b") == 0

    asyncio.run(story())


def test_an_error_gives_the_turn_back() -> None:
    async def story() -> None:
        turns: Turns[str] = Turns(1)
        with pytest.raises(ValueError):
            async with turns.turn("a"):
                raise ValueError
        async with asyncio.timeout(1), turns.turn("b"):
            pass

    asyncio.run(story())


def test_a_turn_is_not_handed_to_one_that_was_cancelled_at_that_moment() -> None:
    async def inner() -> None:
        turns = Turns[str](1)

        async def hold() -> None:
            async with turns.turn("a"):
                await asyncio.sleep(10)

        tasks = [asyncio.create_task(hold()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks:  # the first gives its turn back before the others run
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True)
        )
        async with asyncio.timeout(1), turns.turn("b"):
            assert turns.of("a") == 0

    asyncio.run(inner())
