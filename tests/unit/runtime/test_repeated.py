"""Values that come again are the objects that came before."""

from overlap_spec.runtime.heap import MOST_KEPT, Repeated


def test_an_equal_value_is_the_object_that_came_before_and_others_are_themselves() -> None:
    repeated = Repeated()
    first, again, other = bytes(5000), bytes(bytearray(5000)), bytes(4999)
    assert first is not again
    assert repeated.same("prompt", first) is first and repeated.same("prompt", again) is first
    assert repeated.same("prompt", other) is other
    assert repeated.same("list", again) is again, "another kind"
    biases = {i: 0.5 for i in range(100)}
    assert repeated.same("bias", biases) is biases and repeated.same("bias", dict(biases)) is biases


def test_only_the_last_are_kept() -> None:
    repeated = Repeated()
    values = [bytes([i]) * 100 for i in range(MOST_KEPT + 1)]
    for value in values:
        repeated.same("prompt", value)
    copies = [bytes(bytearray(value)) for value in values]
    assert repeated.same("prompt", copies[-1]) is values[-1]
    assert repeated.same("prompt", copies[0]) is copies[0]


def test_values_that_take_turns_are_all_kept() -> None:
    repeated = Repeated()
    values = [bytes([i]) * 100 for i in range(MOST_KEPT)]
    for _ in range(3):
        for value in values:
            assert repeated.same("prompt", bytes(bytearray(value))) is repeated.same("prompt", value)
            values[values.index(value)] = repeated.same("prompt", value)
    assert all(repeated.same("prompt", bytes(bytearray(value))) is value for value in values)
