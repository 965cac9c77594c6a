"""A language model as draft must mean the same tokens: what is compared, what is refused, what is only noted."""

import json
from pathlib import Path

import msgspec
import pytest
from support.tiny.models import tiny_config
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.config import EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import check_draft_vocabulary, resolve_model

CPU = Machine(num_cores=2, has_cuda=False)


def directory(path: Path, vocab_size: int = 128, tokenizer: bool = True) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny_config(vocab=vocab_size)))
    return write_tokenizer(path, min(vocab_size, 128)) if tokenizer else path


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return resolve_model(EngineConfig(model_path=str(directory(tmp_path / "target"))))


def edit_tokenizer(path: Path, **vocabulary: int) -> None:
    """Move words to other ids."""
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"] |= vocabulary
    (path / "tokenizer.json").write_text(json.dumps(content))


def test_the_same_tokenizer_passes_in_silence_whatever_the_padding(files: ModelFiles, tmp_path: Path) -> None:
    assert check_draft_vocabulary(str(directory(tmp_path / "draft")), files) == []
    assert check_draft_vocabulary(str(directory(tmp_path / "padded", 160)), files) == []


def test_the_first_token_that_differs_is_named(files: ModelFiles, tmp_path: Path) -> None:
    draft = directory(tmp_path / "draft")
    edit_tokenizer(draft, w110=112, w112=110)
    with pytest.raises(ConfigError, match="--speculative-draft-model-path: .*token 110 is 'w112' there and 'w110' in"):
        check_draft_vocabulary(str(draft), files)


def test_a_token_that_only_one_has_is_named(files: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token 120 is missing there and 'w120' in the target's"):
        check_draft_vocabulary(str(directory(tmp_path / "small", 120)), files)


def test_added_tokens_are_compared_too(files: ModelFiles, tmp_path: Path) -> None:
    draft = directory(tmp_path / "draft")
    content = json.loads((draft / "tokenizer.json").read_text())
    content["added_tokens"][3]["content"] = "<|human|>"
    (draft / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"token 3 is '<\|human\|>' there and '<\|user\|>' in"):
        check_draft_vocabulary(str(draft), files)


def test_unigram_vocabularies_are_lists(files: ModelFiles, tmp_path: Path) -> None:
    draft = directory(tmp_path / "draft")
    content = json.loads((draft / "tokenizer.json").read_text())
    by_id = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"] = {"type": "Unigram", "vocab": [[text, -1.5] for text in by_id]}
    (draft / "tokenizer.json").write_text(json.dumps(content))
    assert check_draft_vocabulary(str(draft), files) == []


def test_without_two_tokenizers_sizes_are_compared_and_that_is_said(files: ModelFiles, tmp_path: Path) -> None:
    bare = directory(tmp_path / "bare", tokenizer=False)
    (note,) = check_draft_vocabulary(str(bare), files)
    assert "only the size" in note and f"{bare} has no tokenizer.json" in note
    without = msgspec.structs.replace(files, tokenizer_dir=None)
    (note,) = check_draft_vocabulary(str(directory(tmp_path / "full")), without)
    assert "no tokenizer is read" in note
    with pytest.raises(ConfigError, match="a vocabulary of 130 tokens and the target one of 128"):
        check_draft_vocabulary(str(directory(tmp_path / "other", 130, tokenizer=False)), files)


def test_a_broken_tokenizer_is_named(files: ModelFiles, tmp_path: Path) -> None:
    draft = directory(tmp_path / "draft")
    (draft / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"draft/tokenizer\.json: not a tokenizer with a vocabulary"):
        check_draft_vocabulary(str(draft), files)


def test_numbers_are_the_methods_own(files: ModelFiles) -> None:
    """(3, 1, 4) where nothing is said, for a Llama target too; the widths may then be narrower."""
    config = EngineConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path="/drafts/small")
    settings, notes = resolve(config, files, CPU)
    spec = settings.spec
    assert (spec.num_steps, spec.topk, spec.width, spec.narrower) == (3, 1, 4, (1, 2, 3))
    assert any("(3, 1, 4)" in note for note in notes)


def test_the_path_is_required_even_where_the_target_has_a_head_of_its_own(files: ModelFiles) -> None:
    alias = msgspec.structs.replace(files, preset_draft="/heads/eagle3", preset_spec=("EAGLE3", 3, 1, 4))
    with pytest.raises(ConfigError, match="--speculative-draft-model-path: STANDALONE needs a draft model"):
        resolve(EngineConfig(speculative_algorithm="STANDALONE"), alias, CPU)


def test_a_tree_keeps_the_numbers_it_was_given(files: ModelFiles) -> None:
    flags = {"speculative_num_steps": 4, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
    config = EngineConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path="/drafts/small", **flags)
    spec = resolve(config, files, CPU)[0].spec
    assert (spec.num_steps, spec.topk, spec.width, spec.narrower) == (4, 2, 7, ())
