"""Extensions of messages: what a link's decoder knows, what it refuses and where, and rows that are taken."""

import msgspec
import pytest

from overlap_spec.messages import (
    EXTENSIONS,
    AuditRoom,
    EngineLimits,
    Extension,
    FlushCache,
    GuessReport,
    LogProbRows,
    Margins,
    StepResult,
    TreePaths,
    WorkerReady,
    carrying,
    find,
)

LINK = StepResult | FlushCache
READY = WorkerReady(4, 65, 4, 256, 4, 2, 1, 97, 64, extensions=(AuditRoom(5, 2, 4),))
MARGINS, PATHS = Margins([0.5, -1.0]), TreePaths([[1], []], [3, 0])


def result(*extensions: Extension) -> StepResult:
    return StepResult(7, [[1, 2], [3]], [1, 1], 0.1, extensions=extensions)


def passed(message: object, kinds: tuple[type[Extension], ...] = EXTENSIONS) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=carrying(LINK, kinds))


@pytest.mark.parametrize("message", [result(), result(MARGINS), result(PATHS, LogProbRows([b"", b"x"])), FlushCache()])
def test_what_is_attached_passes_a_link(message: object) -> None:
    assert passed(message) == message
    assert type(passed(message)) is type(message)


def test_what_is_not_attached_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"Invalid value 'Margins' - at `\$\[7\]\[0\]\[0\]`"):
        passed(result(MARGINS), (TreePaths, LogProbRows))
    with pytest.raises(msgspec.ValidationError, match=r"Margins"):
        passed(result(MARGINS), ())
    assert passed(result(), ()) == result()


def test_messages_of_features_pass_a_link_that_takes_any() -> None:
    """Rows are no messages: they travel in others."""

    class Told(Extension, frozen=True):
        number: int

    link = carrying(StepResult | Extension | FlushCache, (Told, Margins))
    for message in (Told(3), result(MARGINS), FlushCache()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=link) == message
    for refused in (Margins([0.5]), Extension()):
        with pytest.raises(msgspec.ValidationError, match=f"Invalid value '{type(refused).__name__}'"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(refused), type=link)


def test_a_bad_payload_names_its_place() -> None:
    payload = ["StepResult", 7, [[1]], [1], 0.1, 0.0, 0.0, [["Margins", [0.5, "wide"]]]]
    with pytest.raises(msgspec.ValidationError, match=r"Expected `float`, got `str` - at `\$\[7\]\[0\]\[1\]\[1\]`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=carrying(LINK, EXTENSIONS))


def test_one_of_each_type_is_found() -> None:
    message = result(PATHS, MARGINS)
    assert find(message.extensions, Margins) is MARGINS and find(message.extensions, TreePaths) is PATHS
    assert find(message.extensions, GuessReport) is None and find((), Margins) is None


def test_rows_are_taken_in_order_from_columns_that_have_any() -> None:
    assert GuessReport([1, 2, 3], [4, 5, 6], [7, 8, 9]).take([2, 0]) == GuessReport([3, 1], [6, 4], [9, 7])
    assert LogProbRows([], [b"a", b"b"]).take([1]) == LogProbRows([], [b"b"])
    assert PATHS.take([]) == TreePaths([], [])


@pytest.mark.parametrize("message", [EngineLimits(64, 128, 4, 97, extensions=(AuditRoom(5, 2, 4),)), READY])
def test_what_a_worker_keeps_for_features_reaches_their_other_parts(message: EngineLimits | WorkerReady) -> None:
    link = carrying(EngineLimits | WorkerReady, EXTENSIONS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=link) == message
