"""A draft that learns: from whose texts, and what the scheduler asks for and when."""

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.fake_device import make_admit

from overlap_spec.config import ApiKeys, EngineConfig, Machine, ModelFiles
from overlap_spec.config.keys import read_keys
from overlap_spec.config.resolve import resolve, settled_flags
from overlap_spec.errors import ConfigError
from overlap_spec.features.adapt_draft import (
    Finished,
    Follow,
    GoBack,
    Judge,
    LearningRoom,
    StartAgain,
    TakeOver,
    Train,
    Worked,
)
from overlap_spec.features.adapt_draft.frontend import ConsentHook
from overlap_spec.features.adapt_draft.scheduler import (
    JUDGED_EVERY,
    LEAST_SAMPLES,
    MOST_HELD,
    MOST_SAVED_S,
    PASSES,
    WATCHED,
    Learning,
    LiveLength,
    Segments,
    before_loop,
)
from overlap_spec.messages import Resumed, Stats, StepResult, Terms
from overlap_spec.scheduler.requests import Request

FILES = ModelFiles(
    weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
    preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
)  # fmt: skip
TWO = ApiKeys({"k1": "alice", "k2": "bob"}, admin="root")
MARKED = ApiKeys({"k1": "alice", "k2": "bob"}, admin="root", sharing=("bob",))


NO_KEYS = ApiKeys()


def resolved(keys: ApiKeys = NO_KEYS, **flags: Any) -> Any:
    flags = {"adapt_draft": True, "device": "cpu"} | flags
    return resolve(EngineConfig(**flags), FILES, Machine(2, False), keys)


# --- consent ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "flags", "names"),
    [
        (ApiKeys(), {}, None),
        (ApiKeys({"k": "alice"}), {}, None),
        (MARKED, {}, ("bob",)),
        (MARKED, {"isolate_clients": False}, ("bob",)),
        (ApiKeys({"k": "alice"}, sharing=("alice",)), {"isolate_clients": True}, ("alice",)),
    ],
    ids=["no keys", "one name", "two names", "two that share all but what they send", "one that is kept apart"],
)
def test_whose_texts_are_learnt_from(keys: ApiKeys, flags: dict[str, Any], names: tuple[str, ...] | None) -> None:
    settings, notes = resolved(keys, **flags)
    assert (settings.adapt.share, settings.adapt.names, settings.adapt.save) == (0.05, names, None)
    (said,) = [note for note in notes if "learns from the texts" in note]
    assert ("bob" in said) == (names == ("bob",)) and '"adapt": false' in said
    told = settled_flags(EngineConfig(**flags), settings)["adapt_learns_from"]
    assert told == ("texts of all requests" if names is None else "texts of clients that are marked in the key file")


def test_nothing_is_learnt_by_default() -> None:
    settings, notes = resolved(MARKED, adapt_draft=False)
    assert not settings.adapt.share and not any("learns" in note for note in notes)
    assert settled_flags(EngineConfig(), settings)["adapt_learns_from"] is None


def test_a_directory_that_gets_heads_is_warned_of() -> None:
    settings, notes = resolved(adapt_save="/heads", adapt_share=0.2)
    assert (settings.adapt.share, settings.adapt.save) == (0.2, "/heads")
    assert any("/heads; it can remember what it has read" in note for note in notes)


REFUSED: list[tuple[dict[str, Any], ApiKeys, str]] = [
    ({}, TWO, "--adapt-draft: clients are kept apart, and none is marked"),
    ({"adapt_draft": False, "adapt_share": 0.1}, TWO, "--adapt-share: has no effect without --adapt-draft"),
    ({"adapt_draft": False, "adapt_save": "/heads"}, TWO, "--adapt-save: has no effect without --adapt-draft"),
    ({"speculative_algorithm": "NGRAM"}, NO_KEYS, "--adapt-draft: an EAGLE-3 head can learn .* is NGRAM's"),
    ({"speculative_algorithm": "NONE"}, NO_KEYS, "--adapt-draft: an EAGLE-3 head can learn .* is NONE's"),
    ({"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}, NO_KEYS,
     "--speculative-eagle-topk: cannot go with --adapt-draft: a head learns for chains, got 2"),
    ({"speculative_draft_model_quantization": "fp8"}, NO_KEYS,
     "--speculative-draft-model-quantization: cannot go with --adapt-draft"),
    ({"speculative_use_rejection_sampling": True}, NO_KEYS,
     "--speculative-use-rejection-sampling: cannot go with --adapt-draft: tokens then depend on the draft"),
    ({"speculative_simulate_acc_len": (2.0,)}, NO_KEYS, "--speculative-simulate-acc-len: cannot go"),
    ({"tp_size": 2}, NO_KEYS, "--tp-size: cannot go with --adapt-draft: a head learns on one device, got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "keys", "said"), REFUSED)
def test_what_cannot_learn_is_refused_by_name(flags: dict[str, Any], keys: ApiKeys, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        resolved(keys, **flags)


def test_deterministic_inference_is_refused() -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}
    config = EngineConfig(adapt_draft=True, device="cpu", dtype="float32", enable_deterministic_inference=True)
    with pytest.raises(ConfigError, match="^--enable-deterministic-inference: cannot go with --adapt-draft"):
        resolve(config, replace(FILES, config=llama), Machine(2, False))


def keys_of(path: Path, text: str) -> ApiKeys:
    path.write_text(text)
    path.chmod(0o600)
    return read_keys(EngineConfig(api_key_file=str(path)))


def test_marks_of_the_key_file(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys", "alice:sk-1\nbob:sk-2 adapt\nsk-3\t adapt\nbob:sk-4  adapt\ncarol:sk-adapt\n")
    assert keys.names == {"sk-1": "alice", "sk-2": "bob", "sk-3": "line 3", "sk-4": "bob", "sk-adapt": "carol"}
    assert keys.sharing == ("bob", "line 3")


@pytest.mark.parametrize("text", ["bob:sk-1 adapt\nbob:sk-2\n", "bob:sk-1\nbob:sk-2 adapt\n"])
def test_a_name_is_marked_in_all_its_lines_or_in_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="line 2: bob is marked as adapt in one line and not in another"):
        keys_of(tmp_path / "keys", text)


@pytest.mark.parametrize(
    ("names", "key", "adapt", "is_learnt"),
    [
        (None, "", True, True),
        (None, "alice", True, True),
        (None, "alice", False, False),
        (("bob",), "bob", True, True),
        (("bob",), "bob", False, False),
        (("bob",), "alice", True, False),
        (("bob",), "", True, False),
        (("bob",), "admin", True, False),
    ],
)
def test_a_request_is_learnt_from_by_consent(
    names: tuple[str, ...] | None, key: str, adapt: bool, is_learnt: bool
) -> None:
    request = cast(Any, SimpleNamespace(terms=Terms(key=key, adapt=adapt)))
    assert ConsentHook(names).admission(request, make_admit(1, [5])).is_learnt == is_learnt


# --- the scheduler ------------------------------------------------------------------------------------------

ROOM = LearningRoom(num_segments=24, segment_rows=32, batch=3)


class Played:
    """`Learning`, whose orders are kept."""

    def __init__(self, share: float = 0.2) -> None:
        self.is_idle, self.sent = True, list[Any]()
        self.now = 0.0  # of the host
        self.learning = Learning(ROOM, share, self._sent, lambda: self.is_idle, Stats, lambda: self.now)
        self.host_s = 0.0  # that each message takes
        self.numbers = random.Random(1)

    def _sent(self, message: Any) -> None:
        self.now += self.host_s
        self.sent.append(message)

    def taken(self) -> list[Any]:
        sent = self.sent[:]
        self.sent.clear()
        return sent

    def begin(self, uid: int, prompt: int = 10, **changes: Any) -> Request:
        tokens = [self.numbers.randrange(100) for _ in range(prompt)]
        admit = replace(make_admit(uid, tokens, 100), is_learnt=True)
        request = Request(replace(admit, **changes), cast(Any, None))
        request.own_tokens()
        self.learning.started(request)
        return request

    def end(self, request: Request, answer: int = 20) -> None:
        request.tokens.extend(self.numbers.randrange(1000) for _ in range(answer))
        self.learning.closed(request)

    def samples(self, count: int, first: int = 1) -> None:
        for uid in range(first, first + count):
            self.end(self.begin(uid))

    def step(self, gpu_time: float, chunks: int = 0, gpu_gap: float = 0.0) -> None:
        step = SimpleNamespace(windows=[None], chunks=[None] * chunks)
        self.learning.settled(cast(Any, step), StepResult(1, [], [], gpu_time, gpu_gap))

    def answer(self, **worked: Any) -> None:
        self.learning.message(Worked(**({"seconds": 0.01} | worked)))


def test_segments_are_bounded_and_the_oldest_sample_goes() -> None:
    segments = Segments(4)
    held = [segments.take(), segments.take()]
    assert held == [0, 1] and segments.take() is None, "no more than half are of requests that run"
    for segment in (0, 1):
        segments.end(segment, is_sample=True)
    for _ in range(2):
        taken = segments.take()
        assert taken is not None
        segments.end(taken, is_sample=True)
    assert list(segments.passes) == [0, 1, 2, 3] and segments.take() == 0 and list(segments.passes) == [1, 2, 3]
    segments.end(0, is_sample=False)
    assert segments.free == [0] and segments.num_open == 0


def test_the_newest_samples_are_held_out_and_never_learnt_before() -> None:
    """However many come and go: what is held out has never been in a batch."""
    segments, rng = Segments(40), random.Random(3)
    for _ in range(300):
        segment = segments.take()
        assert segment is not None
        segments.end(segment, is_sample=rng.random() < 0.9)
        assert all(segments.passes[each] == 0 for each in segments.held_out)
        assert len(segments.held_out) == min(len(segments.passes) // 4, 16)
        for each in segments.batch(3):
            segments.passes[each] += 1
            assert segments.passes[each] <= PASSES


def test_a_request_becomes_a_sample() -> None:
    played = Played()
    request = played.begin(7, prompt=20)
    assert played.taken() == [Follow(7, 0, 12)], "a quarter of the rows is for the prompt's end"
    played.end(request, answer=60)
    (finished,) = played.taken()
    assert finished == Finished(0, request.tokens[12:44].tobytes(), 8), "what fits the segment"
    assert played.learning.report(Stats()).adapt.samples == 1  # type: ignore[union-attr]  # the flag is on


@pytest.mark.parametrize("changes", [{"is_learnt": False}, {"resumed": Resumed(b"", 0, 0)}])
def test_other_requests_are_not_followed(changes: dict[str, Any]) -> None:
    played = Played()
    played.end(played.begin(3, **changes))
    played.end(played.begin(-3))  # of a feature that runs it again
    assert played.taken() == [] and played.learning.segments.num_open == 0


def test_a_request_that_was_preempted_is_no_sample() -> None:
    played = Played()
    request = played.begin(3)
    played.learning.started(request)
    played.end(request)
    assert played.taken() == [Follow(3, 0, 2)] and played.learning.segments.free[-1] == 0


def test_short_answers_and_loops_are_not_learnt() -> None:
    played = Played()
    played.end(played.begin(1), answer=7)
    assert len(played.taken()) == 1 and not played.learning.segments.passes
    loop = [1, 2, 3, 4, 5, 6]
    request = played.begin(2)
    request.tokens.extend(loop * 5)
    played.learning.closed(request)
    assert len(played.taken()[-1].tokens) == 4 * (8 + 18), "the prompt's end, and three of five"
    assert before_loop([9, *loop * 5], 1) == 19 and before_loop(loop * 5, 30) == 30
    assert before_loop(list(range(40)), 3) == 40


def test_idle_time_is_used_until_all_was_seen() -> None:
    played = Played()
    played.samples(LEAST_SAMPLES - 1)
    assert not [each for each in played.taken() if isinstance(each, Train)]
    played.samples(1, first=50)
    orders = [each for each in played.taken() if isinstance(each, Train | Judge)]
    assert len(orders) == 1, "one at a time"
    seen, judged, steps = list(orders[0].segments), 0, 1
    for _ in range(200):
        played.answer()
        orders = played.taken()
        if not orders:
            break
        (order,) = orders
        judged += isinstance(order, Judge)
        steps += isinstance(order, Train)
        seen += order.segments if isinstance(order, Train) else ()
    held = set(played.learning.segments.held_out)
    assert len(held) == 2 and sorted(seen) == sorted(
        each for each in range(LEAST_SAMPLES) if each not in held for _ in range(PASSES)
    )
    assert judged == 1, "at the end: these are fewer steps than a judgement takes"
    figures = played.learning.figures
    assert figures.steps == steps and played.learning.spent_s == pytest.approx(0.01 * (steps + 1))
    assert figures.versions == 0, "nothing was measured"


def test_beside_requests_learning_is_paid_for() -> None:
    played = Played(share=0.2)
    played.is_idle = False
    played.samples(12)
    assert not any(isinstance(each, Train) for each in played.taken()), "nothing was saved yet"
    spent = worked = 0.0
    for _ in range(500):
        played.step(0.01)
        worked += 0.01
        if played.taken():
            spent += 0.05
            played.answer(seconds=0.05)
            assert not played.taken(), "that was more than what was saved"
    share = spent / (spent + worked)
    assert 0 < share <= 0.2 + 0.06 / (spent + worked), share
    played.step(1e6)
    assert played.learning.saved_s <= MOST_SAVED_S


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
@pytest.mark.parametrize(("host_s", "keep_s"), [(0.0, 0.0), (0.0001, 3e-6), (0.002, 3e-6), (0.02, 3e-6)])
def test_the_share_holds_on_any_host(share: float, host_s: float, keep_s: float) -> None:
    """Steps wait for the host: messages and the worker's part count, beside orders and states that are kept."""
    played = Played(share)
    learning, costs, before = played.learning, 0.0, 0.0
    learning.room = replace(ROOM, keep_s=keep_s)
    played.is_idle, played.host_s = False, host_s
    open_requests = deque(played.begin(uid) for uid in range(8))
    for number in range(8, 4000):
        gap, before = costs - before, costs
        played.step(0.01, chunks=1, gpu_gap=gap)
        played.end(open_requests.popleft())
        open_requests.append(played.begin(number))
        for message in played.taken():
            costs += host_s
            if isinstance(message, Train | Judge):
                played.answer(seconds=0.03, upkeep_s=2 * host_s)
                costs += 0.03 + 2 * host_s
    worked, kept = 0.01 * 3992, keep_s * 13 * 3992
    costs += kept
    assert learning.spent_s >= 0.95 * costs - 0.1 - 10 * host_s, (learning.spent_s, costs)
    assert costs <= share * (worked + costs) + 0.1 + 20 * host_s, (costs, worked)
    assert learning.figures.steps > 5 or host_s > 0.001


def test_what_no_step_has_waited_for_costs_nothing() -> None:
    """The host has worked while the device did; an order's own seconds are no host's."""
    played = Played(share=0.2)
    played.is_idle, played.host_s = False, 0.001
    played.samples(12)
    played.step(0.01, gpu_gap=0.0)
    assert played.learning.spent_s == 0.0
    played.samples(1, first=90)
    played.step(0.01, gpu_gap=0.0005)
    assert played.learning.spent_s == pytest.approx(0.0005)
    assert any(isinstance(each, Train) for each in played.taken())
    played.answer(seconds=0.03, upkeep_s=0.004)
    assert played.learning.spent_s == pytest.approx(0.0305), "no step has waited so long for the worker"
    played.step(0.01, gpu_gap=0.03 + 0.002)  # which came behind the order
    played.learning._asked = Train(())
    played.answer(seconds=0.03, upkeep_s=0.004)
    assert played.learning.spent_s == pytest.approx(0.0305 + 0.001 + 0.03 + 0.002, abs=2e-3)


def test_what_is_free_waits_until_it_is_still_and_is_undone_if_a_step_comes() -> None:
    """No more than the share of the time that was still can be waited for."""
    played = Played(share=0.2)
    played.samples(12)
    orders = [each for each in played.taken() if isinstance(each, Train)]
    assert [each.still_s for each in orders] == [0.0], "no order's seconds are known"
    played.answer(seconds=0.03)
    (order,) = played.taken()
    assert order.still_s == pytest.approx(0.03 * 0.8 / 0.2)
    passes = played.learning.segments.passes
    seen, before = [passes[each] for each in order.segments], played.learning.figures.steps
    played.answer(seconds=0.0, is_done=False)
    assert not played.taken() and [passes[each] + 1 for each in order.segments] == seen
    assert played.learning.figures.steps == before
    played.learning.saved_s = 0.1
    played.step(0.01)
    (order,) = played.taken()
    assert order.still_s == 0.0, "it is paid for"
    played.answer(seconds=0.03)
    assert played.learning.saved_s == pytest.approx(0.1 + 0.01 * 0.25 - 0.03)


def test_requests_are_followed_as_far_as_they_are_learnt_from_and_paid_for() -> None:
    played = Played(share=0.2)
    played.is_idle = False
    played.samples(40)
    followed = [each for each in played.taken() if isinstance(each, Follow)]
    assert len(followed) == MOST_HELD + 2 * ROOM.batch
    learning = played.learning
    learning.segments.passes = dict.fromkeys(learning.segments.passes, 1)
    learning._order_s, learning.saved_s = 0.03, -0.059
    played.begin(100)
    assert len(played.taken()) == 1
    learning.saved_s = -0.061
    played.begin(101)
    assert not played.taken(), "too much is owed"


def after_training(played: Played) -> None:
    """Until the next order is a judgement."""
    played.samples(ROOM.num_segments // 2)
    for _ in range(JUDGED_EVERY + 1):
        orders = [each for each in played.taken() if isinstance(each, Train | Judge)]
        if isinstance(orders[-1], Judge):
            assert orders[-1].segments == played.learning.segments.held_out
            return
        played.answer()
    raise AssertionError("no judgement")


@pytest.mark.parametrize(("copy", "orders"), [(2.05, [TakeOver()]), (2.03, []), (1.0, [])])
def test_a_better_head_takes_over(copy: float, orders: list[Any]) -> None:
    played = Played()
    after_training(played)
    played.answer(live_length=2.0, copy_length=copy)
    assert [each for each in played.taken() if not isinstance(each, Train)] == orders
    (told,) = played.learning.replies()
    assert told.adapt is not None and told.adapt.copy_length == copy and not played.learning.replies()
    figures = played.learning.figures
    assert (figures.versions, figures.live_length, figures.copy_length) == (len(orders), 2.0, copy)
    assert figures.gain == pytest.approx(0.025 if orders else 0.0)


def test_a_head_with_nan_is_refused() -> None:
    played = Played()
    after_training(played)
    played.answer(live_length=2.0, copy_length=9.0, is_finite=False)
    assert [each for each in played.taken() if not isinstance(each, Train)] == [StartAgain()]
    assert (played.learning.figures.versions, played.learning.figures.refused) == (0, 1)


@pytest.mark.parametrize(("length", "is_dropped"), [(1, True), (3, False)])
def test_a_head_is_dropped_if_live_accept_length_falls(length: int, is_dropped: bool) -> None:
    played = Played()
    for _ in range(300):
        played.learning.verified({("greedy", 2, 3): 4, ("greedy", 1, 0): 9, (None, 1, 0): 5}, True)
    after_training(played)
    played.answer(live_length=2.0, copy_length=3.0)
    played.taken()
    for _ in range(WATCHED // 4):
        assert GoBack() not in played.taken()
        played.learning.verified({("sampled", length, 3): 4}, True)
    assert (GoBack() in played.taken()) == is_dropped
    assert played.learning.figures.dropped == is_dropped


def test_no_other_head_takes_over_while_one_is_watched() -> None:
    played = Played()
    after_training(played)
    played.answer(live_length=2.0, copy_length=3.0)
    for _ in range(200):
        orders = played.taken()
        assert not any(isinstance(each, Judge) for each in orders)
        if orders:
            played.answer()


def test_accept_lengths_are_compared_at_equal_numbers_of_guesses() -> None:
    """Fewer guesses in a step accept less, and that is no fault of the head."""
    before, now = LiveLength(), LiveLength()
    before.add(7, 100, 400)
    before.add(1, 100, 150)
    now.add(1, 100, 148)
    assert not now.fell(before)
    now.add(7, 100, 300)
    assert now.fell(before)
    now.add(7, 10**6, 10**6)
    assert now.total <= 10**6, "older steps count half as much"
