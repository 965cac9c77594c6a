"""Finds the weight files of a Hugging Face directory, and reads the headers of safetensors.

A draft that does not fit is refused before any process starts: of another method, of another vocabulary, as target.
The names of its tensors tell what a checkpoint is, and safetensors files list them in their headers. A .bin can only be
opened with torch, so the worker checks it, before it loads the target.

**Vocabularies** are compared of a target and of a language model that drafts for it. Guesses are ids: a draft
with another vocabulary runs, and the output stays exact, but almost no guess is accepted. tokenizer.json has the
meaning of every id. config.json has the number of ids, which model families pad differently.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlap_spec.config import DUMMY, ModelFiles, facts_of
from overlap_spec.config.speculation import (
    METHOD_FACTS,
    DraftKind,
    Shapes,
    can_only_draft,
    draft_kind,
    num_own_layers,
)
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub.config_values import read_json


def refuse_head(directory: Path, config: Mapping[str, Any], load_format: str) -> None:
    """Raises: ConfigError if the directory of a target holds a draft head. `config`: its config.json."""
    if _is_named_head(config) or can_only_draft(_stored_shapes(directory, load_format)):
        raise ConfigError(
            "model_path", f"{directory} is a draft head, not a target; give it as --speculative-draft-model-path"
        )


def check_draft_kind(method: str, directory: str, load_format: str) -> None:
    """Run `refuse_other_kind` on the safetensors of a directory; other formats pass."""
    if shapes := _stored_shapes(Path(directory), load_format):
        refuse_other_kind(method, directory, shapes)


def check_own_layers(directory: str, config: Mapping[str, Any], load_format: str) -> None:
    """Raises: CheckpointError if a target has no tensor of the MTP layers that its config.json counts.

    Fine-tuned and quantised models often lack them. Without safetensors it passes.
    """
    shapes = _stored_shapes(Path(directory), load_format)
    if shapes and draft_kind(shapes) is not DraftKind.MTP:
        raise CheckpointError(
            f"{directory}: found no tensor of an MTP layer, expected those of {num_own_layers(config)} by config.json;"
            " add them from the model that this one was made of, name a draft by --speculative-draft-model-path, or use"
            " --speculative-algorithm NGRAM"
        )


def has_mask_rows(directory: str, load_format: str) -> bool:
    """Whether a head has a tensor for rows of masks (P-EAGLE)."""
    return any(name.endswith("mask_hidden") for name in _stored_shapes(Path(directory), load_format))


def refuse_other_kind(method: str, directory: str, shapes: Shapes) -> None:
    """Raises: CheckpointError if a draft is not of the method's kind, naming the method that it fits."""
    wanted, found = facts_of(method).draft_kinds, draft_kind(shapes)
    if not wanted or found in wanted:
        return
    other = _usual_method(found)
    hint = "" if other is None else f"; use --speculative-algorithm {other}, or another draft"
    raise CheckpointError(f"{directory}: it looks like {found.value}, but {method} drafts with {wanted[0].value}{hint}")


def method_of_draft(directory: Path, load_format: str = "auto") -> str | None:
    """The method that a draft is for, by the names of its safetensors; None if they do not tell."""
    return _usual_method(draft_kind(_stored_shapes(directory, load_format)))


def _usual_method(kind: DraftKind) -> str | None:
    usual = (name for name, facts in METHOD_FACTS.items() if kind in facts.draft_kinds[:1])
    return next(usual, next((name for name, facts in METHOD_FACTS.items() if kind in facts.draft_kinds), None))


def _is_named_head(config: Mapping[str, Any]) -> bool:
    """Whether the architecture names a draft head; many heads have their target's architecture instead."""
    names = map(str, config.get("architectures") or ())
    return config.get("draft_vocab_size") is not None or any(name.endswith(("Eagle", "Eagle3")) for name in names)


def _stored_shapes(directory: Path, load_format: str) -> Shapes:
    """Shapes of the tensors by name; empty if torch is needed to read them, or without weights."""
    files = [] if load_format == DUMMY else weight_files(directory, load_format)
    handles = (open_safetensors(file, "np") for file in files if file.suffix == ".safetensors")
    return {name: shape for handle in handles for name, shape, _ in headers_in(handle)}


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


SAFETENSORS, BIN = ("model.safetensors", ".safetensors"), ("pytorch_model.bin", ".bin")
SHARD = re.compile(r"-(\d+)-of-(\d+)$")  # of a shard's name, before its suffix
FORMATS = {"auto": (SAFETENSORS, BIN), "safetensors": (SAFETENSORS,), "pt": (BIN,)}  # by --load-format, in order


def weight_files(directory: Path, load_format: str = "auto") -> list[Path]:
    """The files of the first format that is present; with `auto`, safetensors come before .bin.

    Raises: CheckpointError if an index names a missing shard.
    """
    found = (_of_format(directory, name, suffix) for name, suffix in FORMATS[load_format])
    return next((files for files in found if files), [])


def open_safetensors(file: Path, framework: str) -> Any:
    """A handle to a mapped file. `framework`: the type of its tensors. Raises: CheckpointError naming the file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from None


def headers_in(handle: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type (BF16, ..) of every tensor of an open file, without reading any."""
    for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
        header = handle.get_slice(name)
        yield name, tuple(header.get_shape()), header.get_dtype()


def check_index(directory: Path, files: Mapping[str, Path]) -> None:
    """Compare the index of shards with what is in them. `files`: where each tensor was found.

    Raises: CheckpointError naming index and tensor, if one is not in the shard that the index names.
    """
    for index in {file.parent / f"{_whole_name(file)}.index.json" for file in files.values()}:
        for name, shard in _weight_map(index).items() if index.is_file() else ():
            if (found := files.get(name)) is None or found.name != shard:
                where = "in none of its files" if found is None else f"in {found.name}"
                raise CheckpointError(f"{index}: tensor {name}: found {where}, expected in {shard}")


def _whole_name(file: Path) -> str:
    """The name that a shard's file would have without shards: model-00001-of-00002.safetensors -> model.safetensors."""
    return SHARD.sub("", file.stem) + file.suffix


def _of_format(directory: Path, name: str, suffix: str) -> list[Path]:
    index = directory / f"{name}.index.json"
    if index.is_file():
        shards = sorted(set(_weight_map(index).values()))
        for shard in shards:
            if not (directory / shard).is_file():
                raise CheckpointError(f"{index}: shard {shard} is missing from {directory}")
        _check_numbers(index, shards)
        return [directory / shard for shard in shards]
    if (directory / name).is_file():
        return [directory / name]
    return sorted(directory.glob(f"{Path(name).stem}*{suffix}"))


def _check_numbers(index: Path, shards: list[str]) -> None:
    """Raises: CheckpointError if shards count themselves, and the index leaves one out."""
    counts = {int(found[1]): int(found[2]) for shard in shards if (found := SHARD.search(Path(shard).stem))}
    of = max(counts.values(), default=0)
    if missing := set(range(1, of + 1)) - counts.keys():
        raise CheckpointError(
            f"{index}: weight_map names {len(shards)} shards of {of}; number {min(missing)} is missing"
        )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r})") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map names no tensor")
    return weight_map
