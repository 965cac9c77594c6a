"""Resolves the name of a model (alias, directory, .gguf file, hub id) to `ModelFiles`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from overlap_spec.config import (
    DUMMY,
    SMOLLM2_SPEC,
    EngineConfig,
    ModelFiles,
    SamplingDefaults,
    SpecSettings,
    cache_directory,
    facts_of,
)
from overlap_spec.config.resolve.speculation import with_mask_rows
from overlap_spec.config.speculation import num_own_layers
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import smollm2
from overlap_spec.hub.config_values import (
    check_eos,
    check_values,
    eos_token_ids,
    read_config,
    read_json,
    sampling_defaults,
)
from overlap_spec.hub.gguf import read_gguf_config, write_gguf_tokenizer
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.hub.snapshots import (
    Progress,
    fetch_config,
    fetch_file,
    fetch_repository,
    fetch_tokenizer,
    ignore_progress,
    is_cached,
    looks_like_hub_id,
)
from overlap_spec.hub.weight_files import (
    check_draft_kind,
    check_draft_vocabulary,
    check_own_layers,
    has_mask_rows,
    refuse_head,
)


def resolve_model(config: EngineConfig, progress: Progress = ignore_progress) -> ModelFiles:
    """Find the target's files, fetching them if need be, and read its config.

    Raises: ConfigError naming the flag, CheckpointError naming the file.
    """
    name = config.model_path
    if config.revision is not None and (name == smollm2.ALIAS or Path(name).expanduser().exists()):
        raise ConfigError("revision", f"{name} is no hub id, and has no revisions; leave it out")
    if name == smollm2.ALIAS:
        return _default_model(config, progress)
    path = Path(name).expanduser()
    if path.is_file():
        return _gguf_model(path, config, progress)
    if not path.is_dir():
        path = _repository("model_path", name, config.load_format, progress, config.revision)
    return _directory_model(path, config, progress)


def is_local(config: EngineConfig) -> bool:
    """Whether nothing must be downloaded for the target's weights. What is neither a path nor a hub id is refused."""
    name = config.model_path
    if name == smollm2.ALIAS:
        return smollm2.weights_file(Path(cache_directory())).is_file()
    if Path(name).expanduser().exists() or not looks_like_hub_id(name):
        return True
    return is_cached(name, config.revision)


def resolve_draft(
    path: str, progress: Progress = ignore_progress, load_format: str = "auto", revision: str | None = None
) -> str:
    """The local directory of a draft head given as directory or hub id. `revision`: of the hub id; None: main.

    Raises: ConfigError naming the flag.
    """
    local = Path(path).expanduser()
    if local.is_file():
        raise ConfigError("speculative_draft_model_path", f"{path} is a file; give the directory that holds it")
    if not local.is_dir():
        return str(_repository("speculative_draft_model_path", path, load_format, progress, revision))
    if revision is not None:
        raise ConfigError(
            "speculative_draft_model_revision", f"{path} is a directory, and has no revisions; leave it out"
        )
    return str(local)


def resolve_drafting(
    spec: SpecSettings, files: ModelFiles, config: EngineConfig, progress: Progress = ignore_progress
) -> tuple[SpecSettings, list[str]]:
    """Find the files that the method drafts with, and check that they fit it. Also returns notes for the log.

    Raises: ConfigError naming the flag, CheckpointError if the draft is another method's.
    """
    notes: list[str] = []
    if spec.draft_path is not None:
        revision = config.speculative_draft_model_revision
        draft = resolve_draft(spec.draft_path, progress, spec.draft_load_format, revision)
        _checked_config("speculative_draft_model_path", Path(draft) / "config.json", read_config)
        if draft == files.weights and num_own_layers(files.config):
            check_own_layers(draft, files.config, spec.draft_load_format)
        else:
            check_draft_kind(spec.method, draft, spec.draft_load_format)
        if facts_of(spec.method).compares_tokenizers:
            notes += check_draft_vocabulary(draft, files)
        if has_mask_rows(draft, spec.draft_load_format):
            spec = with_mask_rows(spec, notes)
        spec = replace(spec, draft_path=draft)
    if spec.token_map is not None:
        spec = replace(spec, token_map=resolve_token_map(spec.token_map, progress))
    if spec.ngram.corpus is not None:
        check_corpus(spec.ngram.corpus)
    return spec, notes


def resolve_token_map(path: str, progress: Progress = ignore_progress) -> str:
    """The local file of a token map given as a path, or as `owner/name/file` on the hub.

    Raises: ConfigError naming the flag.
    """
    field, local = "speculative_token_map", Path(path).expanduser()
    if local.is_file():
        return str(local)
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    if local.exists() or not file or not looks_like_hub_id(f"{owner}/{name}"):
        raise ConfigError(field, f"{path} is no file; give the path of one, or owner/name/file on the hub")
    return str(fetch_file(field, f"{owner}/{name}", file, progress))


def check_corpus(path: str) -> None:
    """Check that the corpus exists; the worker reads it with the weights. Raises: ConfigError."""
    if not Path(path).is_file():
        raise ConfigError("speculative_ngram_external_corpus_path", f"{path} is no file")


def _default_model(config: EngineConfig, progress: Progress) -> ModelFiles:
    if config.load_format == DUMMY:
        weights = smollm2.DATA  # only its config is needed
    else:
        _check_gguf_format(config, smollm2.ALIAS)
        weights = smollm2.fetch_weights(Path(cache_directory()), progress)
    model = read_json(smollm2.DATA / "config.json")
    return ModelFiles(
        weights=str(weights),
        config=model,
        tokenizer_dir=_tokenizer_dir(config, smollm2.DATA, progress),
        eos_token_ids=eos_token_ids(smollm2.DATA, model),
        context_length=model["max_position_embeddings"],
        vocab_size=model["vocab_size"],
        preset_draft=str(smollm2.DRAFT),
        preset_spec=SMOLLM2_SPEC,
        load_format=config.load_format,
        quantization=config.quantization,
        chat_template=_chat_template(config),
    )


def _gguf_model(path: Path, config: EngineConfig, progress: Progress) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ConfigError("model_path", f"{path} is a file but no .gguf; for other formats give the directory")
    _check_gguf_format(config, str(path))
    model = _checked_config("model_path", path, read_gguf_config)
    return _model_files(path, path.parent, model, config, progress)


def _check_gguf_format(config: EngineConfig, name: str) -> None:
    if config.load_format in ("safetensors", "pt"):
        raise ConfigError("load_format", f"{name} is a .gguf file: use gguf, auto or dummy, not {config.load_format}")
    if config.quantization is not None:
        raise ConfigError("quantization", f"{name} is a .gguf file, whose tensors have their own formats; leave it out")


def _directory_model(path: Path, config: EngineConfig, progress: Progress) -> ModelFiles:
    if config.load_format == "gguf":
        raise ConfigError("load_format", f"gguf needs a .gguf file, and {path} is a directory; name the file in it")
    if not (path / "config.json").is_file():
        raise ConfigError("model_path", f"{path} has no config.json; give a Hugging Face directory or a .gguf file")
    model = _checked_config("model_path", path / "config.json", read_config)
    refuse_head(path, model, config.load_format)
    return _model_files(path, path, model, config, progress)


def _model_files(
    weights: Path, beside: Path, model: dict[str, Any], config: EngineConfig, progress: Progress
) -> ModelFiles:
    """`beside`: the directory that may have a tokenizer and a generation config."""
    origin = weights / "config.json" if weights.is_dir() else weights
    sizes = {key: model.get(key) for key in ("max_position_embeddings", "vocab_size")}
    for key, value in sizes.items():
        if value is None:
            raise ConfigError("model_path", f"{origin}: {key} must be a positive integer, found {value!r}")
    _as_config_error("model_path", lambda: quantization_scheme(model, str(origin), config.quantization))
    eos = eos_token_ids(beside, model)
    _as_config_error("model_path", lambda: check_eos(eos, model["vocab_size"], str(beside)))
    return ModelFiles(
        weights=str(weights),
        config=model,
        tokenizer_dir=_own_tokenizer(config, weights) or _tokenizer_dir(config, beside, progress),
        eos_token_ids=eos,
        sampling_defaults=_sampling_defaults(config, beside),
        context_length=model["max_position_embeddings"],
        vocab_size=model["vocab_size"],
        load_format=config.load_format,
        quantization=config.quantization,
        chat_template=_chat_template(config),
    )


def _checked_config(field: str, origin: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    config = read(origin)
    _as_config_error(field, lambda: check_values(config, str(origin)))
    return config


def _as_config_error(field: str, check: Callable[[], object]) -> None:
    """What no weight had to be read for is an error of the flag that names the file."""
    try:
        check()
    except CheckpointError as error:
        raise ConfigError(field, str(error)) from None


def _chat_template(config: EngineConfig) -> str | None:
    """The source of --chat-template. Raises: ConfigError if it is neither a file nor a template."""
    given = config.chat_template
    if given is None:
        return None
    if config.skip_tokenizer_init:
        raise ConfigError("chat_template", "has no effect with --skip-tokenizer-init; leave one of them out")
    if "{%" in given or "{{" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = f"{given} is no readable file; give a file with a Jinja template, or the template itself"
        raise ConfigError("chat_template", text) from None


def _sampling_defaults(config: EngineConfig, directory: Path) -> SamplingDefaults:
    """What a request leaves out; the file of a model whose defaults are not used need not make sense."""
    return sampling_defaults(directory) if config.sampling_defaults == "model" else SamplingDefaults()


def _repository(field: str, name: str, load_format: str, progress: Progress, revision: str | None) -> Path:
    if not looks_like_hub_id(name):
        raise ConfigError(field, f"{name} does not exist")
    if load_format == DUMMY:
        return fetch_config(field, name, progress, revision)
    return fetch_repository(field, name, progress, revision)


def _own_tokenizer(config: EngineConfig, weights: Path) -> str | None:
    """The directory with the tokenizer inside a .gguf file; None if another is wanted or lies beside the file."""
    beside = weights.parent / "tokenizer.json"
    if config.skip_tokenizer_init or config.tokenizer_path is not None or not weights.is_file() or beside.is_file():
        return None
    return str(write_gguf_tokenizer(weights, Path(cache_directory())))


def _tokenizer_dir(config: EngineConfig, beside: Path, progress: Progress) -> str | None:
    """The directory of --tokenizer-path, else the model's own. None only with `skip_tokenizer_init`."""
    if config.skip_tokenizer_init:
        return None
    path = beside
    if config.tokenizer_path is not None:
        path = Path(config.tokenizer_path).expanduser()
        if not path.exists() and looks_like_hub_id(config.tokenizer_path):
            path = fetch_tokenizer("tokenizer_path", config.tokenizer_path, progress)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            "tokenizer_path",
            f"{path} has no tokenizer.json; give a directory that has one (transformers writes it with"
            " save_pretrained), or serve token ids only with --skip-tokenizer-init",
        )
    _check_template(path / "tokenizer_config.json")
    return str(path)


def _check_template(path: Path) -> None:
    """Raises: CheckpointError if the chat template is neither text nor a list of named ones."""
    value = read_json(path).get("chat_template") if path.is_file() else None
    named = [value] if isinstance(value, dict) else value
    if named is None or isinstance(named, str):
        return
    if not isinstance(named, list) or not all(isinstance(each, dict) for each in named):
        raise CheckpointError(f"{path}: chat_template must be text or a list of named templates, found {value!r}")
