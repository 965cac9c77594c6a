"""For how long there has been no connection, on a clock that the test turns."""

from overlap_spec.client.link import Connection


def test_a_connection_is_lost_from_the_beginning_and_from_its_first_end_on() -> None:
    now = 100.0
    connection = Connection(lambda: now)
    now = 107.0
    assert connection.lost_s == 7.0, "it was never there"
    connection.changed(False)
    assert connection.lost_s == 7.0, "an attempt that has failed is no news"
    connection.changed(True)
    now = 200.0
    assert connection.lost_s == 0.0
    connection.changed(False)
    now = 203.0
    connection.changed(False)
    now = 204.0
    assert connection.lost_s == 4.0
    connection.changed(True)
    assert connection.lost_s == 0.0
