"""Compares the token ids of a target and of a language model that drafts for it.

Guesses are ids: a draft with another vocabulary runs, and the output stays exact, but almost no guess is accepted.
tokenizer.json has the meaning of every id. config.json has the number of ids, which model families pad differently.
"""

from pathlib import Path

from overlap_spec.config import ModelFiles
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub.json_file import read_json

FIELD = "speculative_draft_model_path"


def check_draft_vocabulary(draft: str, files: ModelFiles) -> list[str]:
    """Compare the tokenizers, or only the vocabulary sizes if a tokenizer is missing. Returns notes for the log.

    Raises: ConfigError naming the flag and the first token that differs, CheckpointError naming the file.
    """
    if files.tokenizer_dir is None:
        _check_sizes(draft, files)
        return [f"draft {draft}: only the size of its vocabulary was compared with the target's: no tokenizer is read"]
    ours, theirs = (_read_vocabulary(Path(path)) for path in (files.tokenizer_dir, draft))
    if ours is None or theirs is None:
        _check_sizes(draft, files)
        missing = files.tokenizer_dir if ours is None else draft
        return [f"draft {draft}: only the size of its vocabulary was compared: {missing} has no tokenizer.json"]
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            raise ConfigError(
                FIELD,
                f"{draft} has another vocabulary: token {token} is {_named(theirs, token)} there and"
                f" {_named(ours, token)} in the target's {files.tokenizer_dir}; use a draft with the same tokenizer",
            )
    return []


def _check_sizes(draft: str, files: ModelFiles) -> None:
    size = read_json(Path(draft) / "config.json").get("vocab_size")
    if size != files.vocab_size:
        raise ConfigError(
            FIELD,
            f"{draft} has a vocabulary of {size!r} tokens and the target one of {files.vocab_size}, and there are not"
            " two tokenizers to compare token by token; use a draft with the same tokenizer",
        )


def _read_vocabulary(directory: Path) -> dict[int, str] | None:
    """Every token by id, added ones included; None without a tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    try:
        vocabulary = content["model"]["vocab"]
        tokens = (
            {token: text for text, token in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {token: text for token, (text, _) in enumerate(vocabulary)}  # of a unigram model, with scores
        )
        return tokens | {added["id"]: added["content"] for added in content.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a tokenizer with a vocabulary ({error!r})") from None


def _named(tokens: dict[int, str], token: int) -> str:
    return repr(tokens[token]) if token in tokens else "missing"
