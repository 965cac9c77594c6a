"""How guesses are judged, from flags: exact unless asked otherwise, and said so."""

import pytest

from overlap_spec.config import AcceptSettings, EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve, settled_flags
from overlap_spec.errors import ConfigError

FILES = ModelFiles(
    weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
    preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
)  # fmt: skip


def settle(has_cuda: bool = False, **asked: object) -> AcceptSettings:
    config = EngineConfig(**asked)
    return resolve(config, FILES, Machine(num_cores=2, has_cuda=has_cuda))[0].spec.accept


def test_matching_is_the_default_and_what_thresholds_of_one_mean() -> None:
    exact = {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}
    assert settle() == settle(**exact) == AcceptSettings()
    assert str(settle()) == "match (exact, token for token)"


def test_what_is_lossy_says_so() -> None:
    accept = settle(speculative_accept_threshold_acc=0.8)
    assert accept.thresholds and "LOSSY" in str(accept)
    rejection = settle(speculative_use_rejection_sampling=True)
    assert rejection.rejection and "LOSSY" not in str(rejection)


def test_settled_flags_tell_the_thresholds() -> None:
    config = EngineConfig(speculative_accept_threshold_single=0.7)
    flags = settled_flags(config, resolve(config, FILES, Machine(num_cores=2, has_cuda=False))[0])
    assert flags["speculative_accept_threshold_single"] == 0.7
    assert flags["speculative_accept_threshold_acc"] == 1.0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"speculative_use_rejection_sampling": True, "speculative_accept_threshold_acc": 0.5},
            "--speculative-accept-threshold-acc: must be 1.0 with --speculative-use-rejection-sampling",
        ),
        (
            {"speculative_algorithm": "NONE", "speculative_use_rejection_sampling": True},
            "--speculative-use-rejection-sampling: has no effect",
        ),
        (
            {"has_cuda": True, "speculative_use_rejection_sampling": True, "enable_torch_compile": True},
            "--enable-torch-compile: .*--speculative-use-rejection-sampling",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(**asked)
