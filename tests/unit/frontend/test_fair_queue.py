"""Frames that clients have sent: turns between clients, and bytes that come back however a frame leaves."""

from overlap_spec.frontend.overload import TURN, ByteBudget, FairQueue


def queue(per_client: int = 100, in_all: int = 150, most_frames: int = 4) -> FairQueue:
    return FairQueue(ByteBudget(per_client, in_all), most_frames)


def test_clients_take_turns_of_what_each_sent_together() -> None:
    waiting = queue()
    assert waiting.put_together(1, [b"a1", b"a2"]) and waiting.put(1, b"a3", 0)
    assert waiting.put(2, b"b1", 0)
    assert [waiting.take() for _ in range(4)] == [(1, b"a1"), (1, b"a2"), (2, b"b1"), (1, b"a3")]
    assert not waiting and waiting.budget.total == 0


def test_a_long_sending_is_read_in_several_turns() -> None:
    waiting = queue(most_frames=3 * TURN)
    assert waiting.put_together(1, [b"a"] * (TURN + 2)) and waiting.put(2, b"b", 0)
    assert [waiting.take()[0] for _ in range(TURN + 3)] == [*[1] * TURN, 2, 1, 1]


def test_what_follows_in_the_same_sending_is_known_while_it_waits() -> None:
    waiting = queue()
    waiting.put_together(1, [b"a", b"bb", b"ccc"])
    left = []
    for _ in range(3):
        waiting.take()
        left.append((waiting.more_bytes, waiting.turn_is_over))
    assert left == [(5, False), (3, False), (0, True)]


def test_a_client_has_so_many_frames_and_bytes_waiting_and_no_more() -> None:
    waiting = queue()
    assert waiting.put_together(1, [bytes(10)] * 3) and not waiting.put_together(1, [bytes(1)] * 2)
    assert waiting.put(1, bytes(70), 0) and not waiting.put(1, b"", 0)
    assert waiting.of(1) == 4 and waiting.budget.of(1) == 100
    assert not waiting.put(2, bytes(51), 0) and waiting.put(2, bytes(50), 0)
    waiting.put_anyway(2, bytes(100), 0)
    assert waiting.of(2) == 2 and waiting.budget.total == 150


def test_a_client_that_is_dropped_gives_its_bytes_back() -> None:
    waiting = queue()
    for _ in range(3):
        assert waiting.put(1, bytes(100), 0) and waiting.put(2, bytes(50), 0)
        waiting.put_anyway(1, b"bye", 0)
        assert waiting.drop(1) == [bytes(100), b"bye"] and waiting.budget.of(1) == 0
        assert waiting.drop(2) == [bytes(50)] and waiting.budget.total == 0
    assert waiting.drop(3) == []


def test_the_next_client_begins_a_turn_where_the_one_whose_turn_it_was_is_dropped() -> None:
    waiting = queue()
    waiting.put_together(1, [b"a1", b"a2"])
    waiting.put_together(2, [b"b1", b"b2"])
    waiting.put(3, b"c", 0)
    waiting.take()
    waiting.drop(1)
    assert [waiting.take()[1] for _ in range(3)] == [b"b1", b"b2", b"c"]


def test_a_client_that_is_held_has_no_turn_and_keeps_its_order_and_its_place_in_bounds() -> None:
    waiting = queue()
    assert waiting.put_together(1, [b"a1", b"a2"]) and waiting.put(2, b"b1", 0)
    assert waiting.first == (1, b"a1") and waiting.first == (1, b"a1"), "looking takes nothing"
    waiting.hold(1)
    assert waiting.put(1, b"a3", 0) and waiting.of(1) == 3 and waiting.budget.of(1) == 6
    assert waiting.take() == (2, b"b1") and not waiting
    assert waiting.put(2, b"b2", 0) and waiting.put(1, b"a4", 0) and not waiting.put(1, b"a5", 0)
    waiting.release(1)
    assert waiting and [waiting.take() for _ in range(5)] == [(2, b"b2"), *((1, b"a%d" % i) for i in range(1, 5))]
    assert waiting.budget.total == 0


def test_a_client_may_be_held_within_its_turn() -> None:
    waiting = queue()
    waiting.put_together(1, [b"a1", b"a2", b"a3"])
    waiting.put_together(2, [b"b1", b"b2"])
    assert waiting.take() == (1, b"a1") and waiting.more_bytes == 4
    waiting.hold(1)
    assert waiting.turn_is_over and waiting.more_bytes == 0
    assert [waiting.take()[1] for _ in range(2)] == [b"b1", b"b2"]
    waiting.release(1)
    assert waiting.take() == (1, b"a2") and waiting.more_bytes == 2


def test_a_client_that_is_held_may_be_dropped() -> None:
    waiting = queue()
    waiting.put_together(1, [b"a1", b"a2"])
    waiting.hold(1)
    assert waiting.drop(1) == [b"a1", b"a2"] and waiting.budget.total == 0 and not waiting.of(1)
    waiting.release(1)
    assert not waiting
