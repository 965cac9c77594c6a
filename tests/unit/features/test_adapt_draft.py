"""A draft that learns: whose texts, what the scheduler asks for and when, and what becomes of weights."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from support.fake_device import make_admit
from support.tiny.models import load_tiny_draft, load_tiny_target, tiny_eagle3, tiny_target

from overlap_spec.config import ApiKeys, EngineConfig, Machine, ModelFiles
from overlap_spec.config.keys import read_keys
from overlap_spec.config.resolve import resolve, settled_flags
from overlap_spec.errors import ConfigError
from overlap_spec.features.adapt_draft.frontend import ConsentHook
from overlap_spec.features.adapt_draft.learner import Learner, LiveHead, Sample, _clip, check_learns, laid_out
from overlap_spec.features.adapt_draft.messages import (
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
from overlap_spec.features.adapt_draft.scheduler import (
    JUDGED_EVERY,
    LEAST_SAMPLES,
    MOST_SAVED_S,
    PASSES,
    WATCHED,
    Learning,
    LiveLength,
    Segments,
    before_loop,
)
from overlap_spec.messages import Resumed, Stats, StepResult, Terms
from overlap_spec.models.layers.linear_forms import FORMS, in_form
from overlap_spec.scheduler.requests import Request
from overlap_spec.train_draft.head import Batch

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
        (MARKED, {"isolate_clients": False}, None),
        (ApiKeys({"k": "alice"}, sharing=("alice",)), {"isolate_clients": True}, ("alice",)),
    ],
    ids=["no keys", "one name", "two names", "two that share all", "one that is kept apart"],
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
        self.learning = Learning(ROOM, share, self.sent.append, lambda: self.is_idle, Stats)
        self.numbers = random.Random(1)

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

    def step(self, gpu_time: float) -> None:
        self.learning.settled(cast(Any, None), StepResult(1, [], [], gpu_time))

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
    assert played.learning.report(Stats()).adapt.samples == 1  # type: ignore[union-attr]


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
    assert figures.steps == steps and figures.seconds == pytest.approx(0.01 * (steps + 1))
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


# --- weights ------------------------------------------------------------------------------------------------

TARGET = tiny_target(3, layers=4)
LOADED = load_tiny_target(TARGET)
HEAD = tiny_eagle3(5, TARGET, agree=False, aux_layers=(0, 2))


def loaded_head(form: str = "") -> Any:
    weights = load_tiny_draft(HEAD, LOADED)
    return in_form(weights, FORMS[form], FORMS[form]) if form else weights


def drawn(tensors: dict[str, torch.Tensor], seed: int = 4) -> dict[str, torch.Tensor]:
    random_ = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=random_).double() for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", ["", "weight @ x.T", "packed"])
def test_weights_are_read_and_written_in_place(form: str) -> None:
    if form == "packed":
        target = load_tiny_target(TARGET, torch.float32)
        weights = in_form(load_tiny_draft(HEAD, target), FORMS[form], FORMS[form])
    else:
        weights = loaded_head(form)
    live = LiveHead(weights)
    kept = {id(weights.fusion.fc.stored), id(weights.layers[0].attention.qkv.stored), id(weights.norm.weight)}
    for name, tensor in live.tensors().items():
        stored = HEAD.tensors[name].to(tensor.dtype)
        torch.testing.assert_close(tensor, stored, msg=name)
    other = drawn(live.tensors())
    live.write(other)
    for name, tensor in live.tensors().items():
        torch.testing.assert_close(tensor, other[name].to(tensor.dtype), rtol=0, atol=0, msg=name)
    assert kept == {id(weights.fusion.fc.stored), id(weights.layers[0].attention.qkv.stored), id(weights.norm.weight)}


def batch(learner: Learner) -> tuple[Batch, torch.Tensor]:
    random_ = torch.Generator().manual_seed(1)
    samples = [(0, Sample(torch.randint(3, 128, (20 + n,), generator=random_).tolist(), 4, 0)) for n in range(2)]
    laid = laid_out(samples, learner.is_known)
    hidden = LOADED.hidden_size
    aux, states = (torch.randn(*laid.rows.shape, n * hidden, generator=random_).double() for n in (2, 1))
    return Batch(laid.batch.tokens, aux, states, laid.batch.lengths, laid.batch.starts), laid.places


def test_steps_change_the_copy_alone_until_it_takes_over() -> None:
    weights = loaded_head()
    learner = Learner(weights, LOADED, 64, num_guesses=2)
    given, places = batch(learner)
    before = {name: tensor.clone() for name, tensor in learner.live.tensors().items()}
    first = float(learner.copy.loss_at(given, places).detach())
    for _ in range(3):
        learner.step(given, places)
    assert float(learner.copy.loss_at(given, places).detach()) < first
    for name, tensor in learner.live.tensors().items():
        assert torch.equal(tensor, before[name]) and not torch.equal(tensor.float(), learner.copy.tensors[name]), name
    learner.take_over()
    for name, tensor in learner.live.tensors().items():
        assert torch.equal(tensor.float(), learner.copy.tensors[name].detach()), name
    learner.step(given, places)
    learner.go_back()
    for name, tensor in learner.live.tensors().items():
        assert torch.equal(tensor, before[name]), name
        assert torch.equal(learner.copy.tensors[name].detach(), before[name].float()), name
    assert learner.num_steps == 0 and not learner._optimiser.state


def test_a_judgement_is_of_both_heads_and_of_the_windows_guesses() -> None:
    """The copy says one token whatever it reads, which is what the samples say: two guesses of seven count."""
    learner = Learner(loaded_head(), LOADED, 64, num_guesses=2)
    given, places = batch(learner)
    given.tokens[:, ::2] = learner.copy.ids[0]
    found, untouched = learner.judge(given, places), learner.copy.accepted(given)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], untouched.clamp(max=2))
    given.tokens[:] = learner.copy.ids[0]
    live = learner.copy.accepted(given).clamp(max=2)
    with torch.no_grad():
        learner.copy.tensors["lm_head.weight"].zero_()
    found = learner.judge(given, places)
    assert torch.equal(found[0], live) and bool(found[2])
    assert int(learner.copy.accepted(given).max()) == 7 and int(found[1].max()) == 2


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "norm.weight"])
def test_numbers_that_are_not_finite_show(name: str) -> None:
    learner = Learner(loaded_head(), LOADED, 64, num_guesses=3)
    given, places = batch(learner)
    assert bool(learner.judge(given, places)[2])
    with torch.no_grad():
        learner.copy.tensors[name].view(-1)[3] = torch.nan
    assert not bool(learner.judge(given, places)[2])


def test_gradients_that_are_not_finite_change_nothing() -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[0.0]])]
    _clip(gradients)
    torch.testing.assert_close(gradients[0], torch.tensor([0.6, 0.8]))
    small = [torch.tensor([0.3])]
    _clip(small)
    torch.testing.assert_close(small[0], torch.tensor([0.3]))
    bad = [torch.tensor([1.0]), torch.tensor([torch.inf])]
    _clip(bad)
    assert [each.tolist() for each in bad] == [[0.0], [0.0]]
    learner = Learner(loaded_head(), LOADED, 64, num_guesses=3)
    given, places = batch(learner)
    given.aux[0, 3] = torch.nan
    before = {name: tensor.detach().clone() for name, tensor in learner.copy.tensors.items()}
    learner.step(given, places)
    for name, tensor in learner.copy.tensors.items():
        torch.testing.assert_close(tensor.detach(), before[name], rtol=1e-4, atol=0, msg=name)


def test_samples_are_laid_out_without_rows_of_others() -> None:
    known = torch.ones(128, dtype=torch.bool)
    known[7] = False
    laid = laid_out([(100, Sample([1, 2, 3, 4, 5, 7], 2, 4)), (200, Sample([9] * 40, 1, 0))], known)
    assert laid.rows.shape == (2, 64)
    assert laid.rows[0].tolist() == [104, 105, 106, 107, *[108] * 60], "the last token has no state"
    assert laid.rows[1].tolist() == [*range(200, 239), *[238] * 25]
    assert laid.batch.lengths.tolist() == [6, 40] and laid.batch.starts.tolist() == [3, 2]
    # Row i guesses token i + 2: of the first sample tokens 3 and 4, as 7 is not known.
    assert laid.places.tolist() == [1, 2, *range(64, 64 + 38)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab": None}, "the target's head"),
        ({"num_hidden_layers": 2}, "layers beside the first"),
        ({"norm_output": True}, "norm_output"),
        ({"norm_before_residual": True}, "norm_before_residual"),
    ],
)
def test_other_heads_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    head = load_tiny_draft(tiny_eagle3(5, TARGET, aux_layers=(0, 2), **changes), LOADED)
    with pytest.raises(ConfigError, match=f"^--adapt-draft: .*{said}"):
        check_learns(head, LOADED)


def test_another_kind_of_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="^--adapt-draft: an EAGLE-3 head .* can learn, not a object"):
        check_learns(object(), LOADED)
