"""`train-draft` from its flags to a draft that serves: hidden states, refusals, and heads that have learnt."""

import argparse
import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.replayed_parts import ReplayedParts
from support.solo import Solo, SoloAnswer
from support.tiny.models import load_tiny_target, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer
from torch import Tensor

from overlap_spec.config import EngineConfig, Machine, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.entrypoints.cli import main, train_draft
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams
from overlap_spec.models.drafts.dspark import BiasedLogits
from overlap_spec.models.interfaces import LoadedTarget, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.train_draft import answers, state
from overlap_spec.train_draft.answers import FeatureRing, LocalEngine
from overlap_spec.train_draft.dflash import DSpark
from overlap_spec.train_draft.head import Batch, Frozen
from overlap_spec.train_draft.state import draft_numbers
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.startup.warmup import capture_graphs

TARGET = tiny_target(3, layers=4, context=0.05)  # most of its tokens follow from the one before
LOADED = load_tiny_target(TARGET)
AUX = (0, 2)
LENGTH = 48


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("target"), TARGET)
    return write_tokenizer(directory)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So small tensors are not worth a second one."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


def whole_forward(tokens: list[int], target: LoadedTarget = LOADED) -> TargetOutput:
    """All tokens at once, in pages of their own."""
    count = len(tokens)
    cache = KVCache.allocate(target.kv_shape, 1 + count, 1, target.embedding.dtype, torch.device("cpu"))
    at = torch.arange(count)
    rows = RowBatch(at, None, 1 + at[None].int(), None, count, True).placed(1)
    with torch.inference_mode():
        return target.attach(cache, count, AUX).forward(torch.tensor(tokens), rows)


def captured(settings: Settings, executor: Executor, geometry: Geometry, *_: object) -> None:
    """What a GPU does before it serves."""
    capture_graphs(executor, geometry, (1, 3), ReplayedParts)


@pytest.fixture(scope="module")
def engine(target: Path, request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    """With fewer slots than there are samples, and chunks shorter than some of them."""
    with pytest.MonkeyPatch.context() as patched:
        if getattr(request, "param", "eager") == "captured":
            patched.setattr(answers, "prepare", captured)
        yield from running_engine(target)


def running_engine(target: Path) -> Iterator[LocalEngine]:
    config = EngineConfig(
        model_path=str(target), dtype="float64", device="cpu", page_size=4, chunked_prefill_size=16,
        max_running_requests=3, context_length=LENGTH, max_total_tokens=256, speculative_algorithm="NONE",
    )  # fmt: skip
    settings, _ = resolve(config, resolve_model(config), Machine(1, False))
    with closing(LocalEngine(settings, lambda loaded: FeatureRing(AUX, loaded.hidden_size, 8 * LENGTH))) as engine:
        yield engine


@pytest.mark.parametrize("engine", ["eager", "captured"], indirect=True)
def test_the_ring_has_the_targets_hidden_states(engine: LocalEngine) -> None:
    """Of two batches, one after another."""
    numbers = random.Random(1)
    batches = [[[numbers.randrange(3, 128) for _ in range(length)] for length in (5, 40, 16, 17, 2, 33, 1)]]
    batches.append([list(reversed(tokens)) for tokens in batches[0]])
    first = [each.clone() for each in engine.states(batches[0], LENGTH)]
    found = [first, engine.states(batches[1], LENGTH)]
    assert list(engine.answers([([7, 8], GREEDY)], ())), "answers in between write nothing there"
    for samples, (aux, hidden) in zip(batches, found, strict=True):
        for row, tokens in enumerate(samples):
            expected = whole_forward(tokens)
            torch.testing.assert_close(aux[row, : len(tokens)], expected.aux)
            torch.testing.assert_close(hidden[row, : len(tokens)], expected.hidden)


GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, seed=0)


def test_answers_are_plain_decodings(engine: LocalEngine) -> None:
    prompts = [[9, 30, 55], [100], [*range(3, 30)], [64, 65], [120, 4, 5, 6]]
    asked = [(prompt, GREEDY) for prompt in [*prompts, [1] * 60]]
    found = {place: answer for place, _, answer in engine.answers(asked, (2,))}
    assert found.pop(5) == [], "a prompt that is too long has no answer"
    for place, prompt in enumerate(prompts):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 12 and tokens[-1] != 2:
            logits = LOADED.head.logits(whole_forward(tokens).hidden[-1:])
            tokens.append(int(logits.argmax()))
        assert found[place] == tokens[len(prompt) :]


def test_answers_end_when_their_time_does(engine: LocalEngine) -> None:
    long = SamplingParams(max_new_tokens=40, temperature=0.0, seed=0, ignore_eos=True)
    found = list(engine.answers((([7, n], long) for n in range(3, 50)), (), until=0.0))
    assert found == [], "none begins"


def prompts(directory: Path, count: int = 160) -> Path:
    numbers, characters = random.Random(0), "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJ.,"
    texts = ["".join(numbers.choices(characters, k=numbers.randint(4, 8))) for _ in range(count)]
    path = directory / "prompts.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    path.write_text("\n".join(lines))
    return path


def train(target: Path, directory: Path, *flags: str, method: str = "EAGLE3", count: int = 160) -> int:
    words = ["train-draft", "--model-path", str(target), "--method", method, "--output", str(directory / "draft")]
    return main([*words, "--prompts", str(prompts(directory, count)), "--device", "cpu", *flags])


REFUSED = {
    "--method: must be EAGLE3 or DFLASH or DSPARK, got 'EAGLE'": ("EAGLE", ()),
    "--time-limit: must be seconds, or a number with s, m or h, got '8x'": ("EAGLE3", ("--time-limit", "8x")),
    "--time-limit: must be seconds, or a number with s, m or h, got '0'": ("EAGLE3", ("--time-limit", "0")),
    "--draft-vocab-size: does not go with DFLASH; leave it out": ("DFLASH", ("--draft-vocab-size", "64")),
    "--speculative-dflash-block-size: does not go with EAGLE3": ("EAGLE3", ("--speculative-dflash-block-size", "4")),
    "--speculative-dflash-block-size: does not go with DSPARK": ("DSPARK", ("--speculative-dflash-block-size", "4")),
    "--speculative-dflash-block-size: must be at least 2, got 1": ("DFLASH", ("--speculative-dflash-block-size", "1")),
    "--speculative-draft-model-path: does not go with DFLASH": ("DFLASH", ("--speculative-draft-model-path", "/head")),
    "--draft-vocab-size: a head to begin with has its own vocabulary": (
        "EAGLE3",
        ("--speculative-draft-model-path", "/head", "--draft-vocab-size", "64"),
    ),
    "--max-steps: must be at least 1, got 0": ("EAGLE3", ("--max-steps", "0")),
    "--learning-rate: must be a number above 0, got 0.0": ("EAGLE3", ("--learning-rate", "0")),
    "unknown flag --speculative-algorithm": ("EAGLE3", ("--speculative-algorithm", "NONE")),
    "unknown flag --tp-size": ("EAGLE3", ("--tp-size", "2")),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(
    message: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method, flags = REFUSED[message]
    assert train(target, tmp_path, *flags, method=method) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "draft").exists()


@pytest.mark.parametrize(("words", "rows"), [("DFLASH", 8), ("DSPARK", 7), ("EAGLE3", 0), ("DSPARK 4", 4)])
def test_a_block_is_by_default_as_long_as_its_methods_window(words: str, rows: int) -> None:
    parser = argparse.ArgumentParser()
    train_draft.add_arguments(parser)
    method, *given = words.split()
    flags = [f"--speculative-dspark-block-size={given[0]}"] if given else []
    asked = parser.parse_args(["--method", method, "--prompts", "p", "--output", "o", *flags])
    train_draft.check_arguments(asked)
    assert train_draft.block_size(asked) == rows


def test_bad_input_is_named_and_loses_nothing(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(target, tmp_path, "--time-limit", "0.01s", count=40) == 2
    assert "--time-limit: 0.01 s are too short for one round" in capsys.readouterr().err
    assert train(target, tmp_path, "--resume", "--max-new-tokens", "4", "--time-limit", "9m", count=40) == 2
    assert "prompts.jsonl: no answer to learn from" in capsys.readouterr().err
    assert state.read_answers(tmp_path / "draft", {"method": "EAGLE3"}) == (40, ([], []))


def engine_with(target: Path, method: str, draft: Path, *numbers: int) -> Solo:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    flags: dict[str, Any] = dict(zip(names, numbers, strict=False))  # () is plain decoding
    config = EngineConfig(model_path=str(target), skip_tokenizer_init=True)
    flags |= {"speculative_algorithm": method, "speculative_draft_model_path": str(draft)} if flags else {}
    return Solo(resolve_model(config), dtype="float32", device="cpu", **({"speculative_algorithm": "NONE"} | flags))


def test_logits_in_training_are_the_drafts_that_serves(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, every tensor of a DSpark draft random, guesses as the tokens before the next."""
    loaded = load_tiny_target(TARGET, torch.float32)
    frozen = Frozen(loaded, *draft_numbers(TARGET.config, "config.json"), 64)
    head, random_ = DSpark(frozen, AUX, 4, 5), torch.Generator().manual_seed(1)
    for tensor in head.tensors.values():
        drawn = torch.randn(tensor.shape, generator=random_)
        drawn = 1 + 0.3 * drawn if tensor.dim() == 1 else drawn * tensor.shape[1] ** -0.5
        tensor.data.copy_(drawn.bfloat16())  # as it is written
    state.write_draft(tmp_path, head.tensors, head.config())
    found, compute = list[Tensor](), BiasedLogits.compute
    monkeypatch.setattr(BiasedLogits, "compute", lambda logits: found.append(compute(logits)) or found[-1])
    prompt = [7, 30, 55, 9]
    with closing(engine_with(target, "DSPARK", tmp_path, 4, 1, 5)) as engine:
        answer = engine.answer(prompt, SamplingParams(max_new_tokens=20, temperature=0.0, seed=0, ignore_eos=True))
    tokens, root = [*prompt, *answer.tokens], len(prompt)
    steps = [guesses for guesses in answer.guesses if len(guesses) == 4]
    assert len(steps) > 8
    for step, guesses in enumerate(steps):
        seen = whole_forward(tokens[:root], loaded)
        aux, hidden = (F.pad(rows, (0, 0, 0, 5)).clone()[None] for rows in (seen.aux, seen.hidden))
        given = torch.tensor([[*tokens[: root + 1], *guesses]])
        batch = Batch(given, aux, hidden, torch.tensor([root + 5]), torch.tensor([len(prompt)]))
        roots, weights = torch.tensor([[root]]), head.weights()
        guessed = roots[..., None] + torch.arange(1, 5)
        ours = F.linear(head.inputs(weights, batch, roots, guessed), head.head(weights))
        theirs = torch.cat(found[4 * step : 4 * step + 4])
        torch.testing.assert_close(ours.detach(), theirs, atol=1e-4, rtol=0)
        root += len(answer.runs[step])


def committed_per_step(answers: list[SoloAnswer]) -> float:
    """As the engine counts it: runs are cut where their answer ends."""
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(len(answer.runs) for answer in answers)


CASES = {
    "EAGLE3": ((7, 1, 8), ("--max-steps", "80"), 1.1, 1.5),
    "DFLASH": ((3, 1, 4), ("--max-steps", "120", "--speculative-dflash-block-size", "4"), 1.1, 1.2),
    # Its first row is the root's, and begins as the target's last layers.
    "DSPARK": ((3, 1, 4), ("--max-steps", "120", "--speculative-dspark-block-size", "3"), 2.0, 2.4),
}


def lengths(line: str) -> tuple[float, float]:
    """The accept length that is told, and the untrained one."""
    found = re.search(r"accept length (\S+) \(untrained (\S+)\)", line)
    assert found is not None, line
    return float(found[1]), float(found[2])


@pytest.mark.full
@pytest.mark.parametrize("method", CASES)
def test_a_draft_that_was_trained_guesses_for_prompts_it_has_not_seen(
    method: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine accepts as many guesses as the trainer has measured, and its tokens are plain decoding's."""
    numbers, flags, most_untrained, least = CASES[method]
    given = ("--time-limit", "9m", "--learning-rate", "0.01", "--max-new-tokens", "32", *flags)
    assert train(target, tmp_path, *given, method=method) == 0
    *_, last, _ = capsys.readouterr().err.splitlines()
    measured, untrained = lengths(last)
    assert measured > least > most_untrained > untrained
    _, (_, held_out) = state.read_answers(tmp_path / "draft", {})
    served: dict[bool, list[SoloAnswer]] = {}
    for speculates in (False, True):
        with closing(engine_with(target, method, tmp_path / "draft", *(numbers if speculates else ()))) as engine:
            served[speculates] = [
                engine.answer(
                    sample.tokens[: sample.start].tolist(),
                    SamplingParams(max_new_tokens=len(sample.answer), temperature=0.0, seed=0, ignore_eos=True),
                )
                for sample in held_out
            ]
    assert [each.tokens for each in served[True]] == [each.tokens for each in served[False]]
    assert [each.tokens for each in served[True]] == [sample.answer.tolist() for sample in held_out]
    rounded = 0.05  # the checkpoint is in 16 bits, and a near-tie may be another guess
    assert committed_per_step(served[True]) == pytest.approx(measured, rel=rounded)


@pytest.mark.full
def test_a_run_goes_on_where_another_has_ended(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--time-limit", "9m", "--learning-rate", "0.01", "--max-new-tokens", "32", "--max-steps", "8")
    assert train(target, tmp_path, *given) == 0
    before = state.read_training(tmp_path / "draft")
    assert before["steps"] == 8
    assert train(target, tmp_path, *given) == 2 and "has a draft already; give --resume" in capsys.readouterr().err
    assert train(target, tmp_path, *given, "--resume", method="DFLASH") == 2
    assert "method: found EAGLE3, and now it is DFLASH" in capsys.readouterr().err
    assert train(target, tmp_path, *given, "--resume") == 0
    after = state.read_training(tmp_path / "draft")
    assert after["steps"] == 16 and torch.equal(after["ids"], before["ids"])
    moments = [kept["optimiser"]["state"][0]["step"] for kept in (before, after)]
    assert [float(step) for step in moments] == [8.0, 16.0]
    _, last, _ = capsys.readouterr().err.splitlines()[-3:]
    (tmp_path / "second").mkdir()
    begins = ("--speculative-draft-model-path", str(tmp_path / "draft"), "--max-steps", "1")
    assert train(target, tmp_path / "second", *given, *begins) == 0, "a head can be trained further on other prompts"
    *_, line, _ = capsys.readouterr().err.splitlines()
    assert lengths(line)[1] == pytest.approx(lengths(last)[0], rel=0.05)
    other = state.read_training(tmp_path / "second" / "draft")
    assert torch.equal(other["ids"], before["ids"])


@pytest.mark.full
def test_a_block_draft_goes_on_with_its_own_block_size(target: Path, tmp_path: Path) -> None:
    given = ("--time-limit", "9m", "--max-new-tokens", "16", "--max-steps", "3")
    assert train(target, tmp_path, *given, "--speculative-dspark-block-size", "4", method="DSPARK", count=60) == 0
    before = state.read_training(tmp_path / "draft")
    assert train(target, tmp_path, *given, "--resume", method="DSPARK", count=60) == 0
    after = state.read_training(tmp_path / "draft")
    assert (before["steps"], after["steps"], after["block_size"], after["mask"]) == (3, 6, 4, before["mask"])
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["block_size"] == 4
    assert float(after["optimiser"]["state"][0]["step"]) == 6.0
    assert all(not torch.equal(tensor, before["tensors"][name]) for name, tensor in after["tensors"].items())
