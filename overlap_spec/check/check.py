"""Runs a check: every stage goes as far as the one before it let it, and each refusal is kept as a sentence.

Formats of tensors are read from the headers of files. Whether a draft fits its target, and which kernels run a model on
a device, is told in words. Ops are asked on the device `meta`, which is taken for the GPU that `assuming` names, or for
a CPU.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from overlap_spec_kernels import Float4Matrices, Float4Weight, Packing, QuantizedStack
from overlap_spec_kernels.launch import assuming, capability_of, runs_gluon
from overlap_spec_kernels.linear.packing import Order
from overlap_spec_kernels.nvrtc import runs_hopper

from overlap_spec import hub
from overlap_spec.check import (
    CONTEXT_BYTES,
    Asked,
    CheckReport,
    DraftPart,
    MemoryPart,
    ModelPart,
    Place,
    TextPart,
    place_of,
)
from overlap_spec.config import DUMMY, EngineConfig, ModelFiles, ServerSettings, Settings, SpecSettings
from overlap_spec.config.keys import read_keys
from overlap_spec.config.resolve import resolve, without_speculation
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.features import without_absent
from overlap_spec.frontend.codec import load_codec
from overlap_spec.hub.weight_files import headers_in, open_safetensors, weight_files
from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.models.drafts.language_draft import LanguageDraftWeights
from overlap_spec.models.drafts.mtp import MtpWeights
from overlap_spec.models.layers.experts import StackedExperts
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.models.loading.checkpoint import type_name
from overlap_spec.models.quantization.grouped import GroupedLinear
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.models.recurrent_state import CHUNK
from overlap_spec.models.work import address, tensors_in
from overlap_spec.sampling.stages import load_processor
from overlap_spec.speculative.drafts import ChainDraft, LoadedProposer, SmallModelDraft, TreeDraft
from overlap_spec.worker.build import check_kv_dtype, load_models
from overlap_spec.worker.startup.geometry import (
    RECURRENT_STATES,
    SNAPSHOTS,
    LoadedModels,
    bytes_per_token,
    demand_of,
    memory_facts,
    settle_geometry,
)
from overlap_spec.worker.startup.memory_budget import GpuMemory

META = torch.device("meta")
QUANTISED = {
    Order.ROWS: "up to 64 rows quantized_stream, 17 to 128 of 8 bits quantized_tiles (Gluon), dequantised in registers;"
    " more rows dequantize, then a BLAS",
    Order.FRAGMENTS: "up to 16 or 32 rows packed_stream, 9 to 128 packed_products, 8 bits to 2,048 (CUDA C++);"
    " more rows dequantize, then a BLAS",
}
EXPERTS = "experts_mlp (Triton), grouped on the device; few bits become 16 in registers"
OF_FLOAT4 = "float4 (Triton), any number of rows, dequantised in registers"
GROUPED = "grouped_linear (C++, compiled at the first start; float32 where there is no compiler)"
RECURRENCE = f"{{}}: windows token by token, prompts by chunks of {CHUNK}"
SIXTEEN_BITS = ("bfloat16", "float16")


def kernels_of(models: LoadedModels, dtype: str) -> dict[str, str]:
    """By what they compute."""
    rows = {f"linears in {name}": text for name, text in _linears(models, dtype)}
    experts = Counter(_stack_format(each, dtype) for each in below(models.target, StackedExperts))
    rows |= {f"experts in {name} ({count})": EXPERTS for name, count in experts.items()}
    if models.target.kv_shape.state.num_layers:
        rows["recurrent layers"] = RECURRENCE.format("torch" if capability_of(META) is None else "gated_delta (Triton)")
    return rows | (_on_cpu() if capability_of(META) is None else _on_gpu(dtype))


def _linears(models: LoadedModels, dtype: str) -> Iterator[tuple[str, str]]:
    formats = Counter((_format(each), _kernels(each)) for each in below((models.target, models.proposer), AnyLinear))
    for (packing, kernels), count in formats.items():
        if packing is not None:
            yield f"{packing} ({count})", GROUPED if capability_of(META) is None else kernels
        elif capability_of(META) is None:
            yield f"{dtype} ({count})", "oneDNN or BLAS, the form that is fastest when timed at start"
        else:
            yield f"{dtype} ({count})", _dense(dtype)


def _format(linear: AnyLinear) -> str | None:
    """None for a matrix of the model's type."""
    if isinstance(linear, GroupedLinear):
        return f"{', '.join(sorted({str(part.bits) for part in linear.operand.parts}))} bits of a .gguf file"
    if not isinstance(linear, QuantizedLinear):
        return None
    operand = linear.operand
    return _few_bits(operand.matrices if isinstance(operand, Float4Weight) else operand.packing)


def _few_bits(stored: Packing | Float4Matrices) -> str:
    bits = "4-bit floats" if isinstance(stored, Float4Matrices) else f"{stored.bits} bits"
    return f"{bits}, groups of {stored.group}" if stored.group else f"{bits}, a scale for each row"


def _stack_format(experts: StackedExperts, dtype: str) -> str:
    match experts.gate_up:
        case Float4Matrices() as matrices:
            return _few_bits(matrices)
        case QuantizedStack() as stack:
            return _few_bits(stack.packing)
        case _:
            return dtype


def _kernels(linear: AnyLinear) -> str:
    """Of a linear in few bits, on a GPU."""
    if not isinstance(linear, QuantizedLinear):
        return ""
    return OF_FLOAT4 if isinstance(linear.operand, Float4Weight) else QUANTISED[linear.operand.packing.order]


def _dense(dtype: str) -> str:
    few = "streamed_linear (Gluon)" if runs_gluon(META) else "whole_rows_linear (Triton), else a BLAS"
    if dtype not in SIXTEEN_BITS or not runs_gluon(META):
        return f"few rows {few}; more rows a BLAS"
    more = "17 to 128 rows warpgroup_linear (Gluon); " if runs_hopper(META) else ""
    wide = "; gates and argmax of many rows wide_linear (CUDA C++)" if runs_hopper(META) else ""
    return f"few rows whole_rows_linear (Triton) and {few}; {more}more rows a BLAS{wide}"


def _on_cpu() -> dict[str, str]:
    return {"attention": "torch, over gathered pages", "drawing": "torch"}


def _on_gpu(dtype: str) -> dict[str, str]:
    ring = runs_gluon(META) and dtype in SIXTEEN_BITS
    in_tiles = ring and runs_hopper(META)
    chunks = "; from 64 rows on, with heads of 64 or 128 in 16 bits, paged_chunks (CUDA C++)" if in_tiles else ""
    long_chunks = f"; {'others' if in_tiles else 'chunks'} from 1,536 rows on cuDNN (chunk_attention)" if ring else ""
    few = "few requests of at most 2,048 tokens, or with such a window"
    short = f"; {few}, in bfloat16 short_decode (CUDA C++)" if in_tiles else ""
    return {
        "attention, decode": f"decode_attention ({'Gluon' if ring else 'Triton'}){short}, trees tree_attention",
        "attention, prompts": f"paged_attention (Triton){chunks}{long_chunks}",
        "launches": "dependent, in CUDA graphs" if runs_gluon(META) else "in CUDA graphs",
    }


def below(node: object, kind: type) -> Iterator[Any]:
    """Everything of a kind below a tree of dataclasses and tuples, shared ones as often as they are there."""
    if isinstance(node, kind):
        yield node
    elif isinstance(node, tuple):
        for child in node:
            yield from below(child, kind)
    elif is_dataclass(node) and not isinstance(node, type):
        for field in fields(node):
            yield from below(getattr(node, field.name), kind)


def draft_fits(models: LoadedModels, spec: SpecSettings) -> dict[str, str]:
    """What a draft shares with its target and what it brings; empty if guesses need no weights."""
    draft, target = _weights(models.proposer), models.target
    if draft is None:
        return {}
    profile = models.proposer.profile
    aux = ", ".join(map(str, profile.aux_layers)) or "none: it reads the last hidden states"
    fits = {
        "hidden size": f"{_hidden_size(draft, target.hidden_size)}, of a target of {target.hidden_size}",
        "vocabulary": _vocabulary(draft, target.vocab_size, spec),
    }
    if isinstance(draft, LanguageDraftWeights):
        return fits
    return fits | {"aux layers": f"{aux} of {target.num_layers}", **_norms(draft)}


def _weights(proposer: LoadedProposer) -> object:
    match proposer:
        case TreeDraft():
            return proposer.chain.draft
        case ChainDraft() | SmallModelDraft():
            return proposer.draft
        case _:
            return getattr(proposer, "layers", None)


def _hidden_size(draft: object, of_target: int) -> int:
    match draft:
        case Eagle3Weights():
            return draft.config.llama.hidden_size
        case LanguageDraftWeights():
            return draft.model.hidden_size
        case _:
            return of_target


def _vocabulary(draft: object, vocab_size: int, spec: SpecSettings) -> str:
    guessed = len(getattr(draft, "target_ids", ())) or vocab_size
    if guessed == vocab_size:
        return f"all {vocab_size} tokens of the target"
    by = "the token map" if spec.token_map is not None else "d2t" if isinstance(draft, Eagle3Weights) else "its own"
    return f"{guessed} of the target's {vocab_size} tokens, by {by}"


def _norms(draft: object) -> dict[str, str]:
    """EAGLE-3.1 normalises each aux hidden state before they are fused, and may feed normalised outputs back."""
    if isinstance(draft, MtpWeights) or not isinstance(draft, Eagle3Weights):
        return {}
    norms, fed_back = len(draft.fusion.norms), draft.config.norm_output
    said = f"of {norms} aux hidden states" if norms else "none before the fusion"
    said = "of all aux hidden states together" if draft.config.norms_all else said
    return {"norms (EAGLE-3.1)": said + ("; its output is fed back normalised" if fed_back else "")}


BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # of safetensors' types; others: 1
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stored_formats(path: Path, load_format: str) -> dict[str, int]:
    """Bytes by format. Empty for random weights, and for .bin files, which tell no sizes without being opened."""
    if load_format == DUMMY or not path.exists():
        return {}
    sizes = _of_gguf(path) if path.is_file() else _of_safetensors(weight_files(path, load_format))
    return dict(sizes.most_common())


def _of_safetensors(files: list[Path]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for file in files:
        for _, shape, dtype in headers_in(open_safetensors(file, "np")) if file.suffix == ".safetensors" else ():
            sizes[NAMES.get(dtype, dtype)] += math.prod(shape) * BYTES.get(dtype, 1)
    return sizes


def _of_gguf(path: Path) -> Counter[str]:
    from overlap_spec.models.loading.gguf_source import read_tensors  # imports numpy and torch

    sizes: Counter[str] = Counter()
    for tensor in read_tensors(path):
        sizes[tensor.kind.name] += tensor.data.nbytes
    return sizes


T = TypeVar("T")
Formats = Callable[[ServerSettings, str], tuple[str, str]]  # by a chat template; "": not read


@dataclass
class Refusals:
    """The reasons so far, each once."""

    sentences: list[str] = field(default_factory=list)

    def unless(self, work: Callable[[], T]) -> T | None:
        """The result, or None with the reason kept."""
        try:
            return work()
        except (CheckpointError, ConfigError) as error:
            said = " ".join(str(error).split())
            if said not in self.sentences:
                self.sentences.append(said)
            return None


def check(
    config: EngineConfig, asked: Asked, formats: Formats, progress: hub.Progress = hub.ignore_progress
) -> CheckReport:
    """Check what the flags ask for. Nothing is refused that an engine with the same flags would start with.

    `formats`: the names of the formats in which the server reads tool calls and reasoning.
    """
    refusals, notes = Refusals(), list[str]()
    place = refusals.unless(lambda: place_of(config, asked))
    files = refusals.unless(lambda: hub.resolve_model(config, progress))
    if place is None or files is None:
        return CheckReport(will_run=False, refused=tuple(refusals.sentences))
    config = _with_method(config, notes)
    settings = _settings(config, files, place, refusals, notes)
    if settings is None:
        return CheckReport(will_run=False, refused=tuple(refusals.sentences), notes=tuple(notes))

    def plain() -> Settings | None:
        return _settings(without_speculation(config), files, place, refusals, [])

    with assuming(_capability(settings, place)):
        return replace(_checked(settings, place, formats, refusals, plain), notes=tuple(notes))


def _checked(
    settings: Settings, place: Place, formats: Formats, refusals: Refusals, plain: Callable[[], Settings | None]
) -> CheckReport:
    """All that follows once the flags are settled. `plain`: settings without speculation."""
    if (capability := capability_of(META)) is not None:
        refusals.unless(lambda: check_kv_dtype(settings, capability))
    models, settings = _models(settings, refusals, plain)
    text = refusals.unless(lambda: _text(settings, formats))
    parts = CheckReport(
        will_run=False,
        refused=(),
        device=_device(settings, place),
        dtype=settings.model.dtype,
        ranks=settings.ranks,
        text=text,
    )
    if models is not None:
        parts = replace(
            parts,
            model=_model(settings, models),
            kernels=kernels_of(models, settings.model.dtype),
            memory=refusals.unless(lambda: _memory(settings, models, place)),
            draft=_draft(settings, models),
        )
    return replace(parts, will_run=not refusals.sentences, refused=tuple(refusals.sentences))


def _with_method(config: EngineConfig, notes: list[str]) -> EngineConfig:
    """The method that a draft is for, where no flag names one: `serve` wants it named."""
    path = config.speculative_draft_model_path
    if path is None or config.speculative_algorithm or not Path(path).is_dir():
        return config
    method = hub.method_of_draft(Path(path))
    if method is None:
        return config
    notes.append(f"--speculative-algorithm {method} is taken, by the draft's tensors; serve wants it named")
    return replace(config, speculative_algorithm=method)


def _settings(
    config: EngineConfig, files: ModelFiles, place: Place, refusals: Refusals, notes: list[str]
) -> Settings | None:
    """With speculation as the flags ask for it; where that is refused, without, to check the target all the same."""

    def settled(asked: EngineConfig) -> Settings:
        settings, said = resolve(without_absent(asked), files, place.machine, read_keys(asked))
        if settings.logit_processor is not None:
            load_processor(settings.logit_processor)
        spec, more = hub.resolve_drafting(settings.spec, files, asked)
        notes.extend((*said, *more))
        return replace(settings, spec=spec)

    with_draft = refusals.unless(lambda: settled(config))
    return with_draft or refusals.unless(lambda: settled(without_speculation(config)))


def _models(
    settings: Settings, refusals: Refusals, without: Callable[[], Settings | None]
) -> tuple[LoadedModels | None, Settings]:
    """The loaders, on headers. A target whose draft is refused is checked by itself: `without` speculation."""
    models = refusals.unless(lambda: load_models(settings, META, ignore, _first_of(settings)))
    if models is not None or settings.spec.width == 1 or (plain := without()) is None:
        return models, settings
    return refusals.unless(lambda: load_models(plain, META, ignore, _first_of(plain))), plain


def _first_of(settings: Settings) -> Rank:
    """The rank whose part is outlined: others have as much."""
    return Rank(0, settings.ranks)


def ignore(done: int, total: int) -> None:
    """Show nothing."""


def _device(settings: Settings, place: Place) -> str:
    if settings.model.device == "cpu":
        return "cpu"
    if place.is_here:
        return torch.cuda.get_device_name()
    major, minor = place.capability
    return f"a GPU of capability {major}.{minor} that is not here"


def _capability(settings: Settings, place: Place) -> tuple[int, int] | None:
    if settings.model.device == "cpu":
        return None
    return torch.cuda.get_device_capability() if place.is_here else place.capability


def _model(settings: Settings, models: LoadedModels) -> ModelPart:
    files, target = settings.model.files, models.target
    return ModelPart(
        path=files.weights,
        architecture=", ".join(map(str, files.config.get("architectures") or ())),
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        context_length=settings.model.max_len,
        stored=stored_formats(Path(files.weights), files.load_format),
    )


def _memory(settings: Settings, models: LoadedModels, place: Place) -> MemoryPart:
    """By the worker's own budget. Raises: ConfigError saying how much is missing, and what to turn down."""
    device, demand = torch.device(settings.model.device), demand_of(settings, models)
    weights = demand.target_weights + demand.draft_weights + demand.draft_log.num_bytes
    memory = _gpu_memory(place, weights) if device.type == "cuda" else None
    geometry = settle_geometry(settings, models, device, memory)
    held = memory_facts(demand, 0).held_bytes if memory is not None else {"of target weights": demand.target_weights}
    if memory is None:  # of a CPU what does not go by the number of slots, and states
        beside = {"of draft weights": weights - demand.target_weights, RECURRENT_STATES: demand.states}
        beside["of features"] = demand.feature_bytes
        held |= {purpose: num_bytes for purpose, num_bytes in beside.items() if num_bytes}
    if geometry.num_snapshots:
        held[SNAPSHOTS] = geometry.num_snapshots * demand.state
    dtype = geometry.cache_dtype
    return MemoryPart(
        total=0 if memory is None else memory.total,
        share=settings.cache.mem_fraction,
        held=held,
        formats=_formats(models),
        kv_bytes_per_token=bytes_per_token(models, dtype),
        draft_kv_bytes_per_token=models.proposer.profile.kv_shape.bytes_per_token(dtype),
        kv_tokens=(geometry.num_pages - 1) * geometry.page_size,
    )


def _gpu_memory(place: Place, weights: int) -> GpuMemory:
    """Of the GPU that was asked for, as if the weights were in it."""
    if place.is_here:
        now = GpuMemory.here()
        return GpuMemory(now.total, now.taken + weights)
    assert place.gpu_bytes is not None
    return GpuMemory(place.gpu_bytes, CONTEXT_BYTES + weights)


def _formats(models: LoadedModels) -> dict[str, int]:
    """Bytes in memory by the type of tensors; shared ones count once."""
    sizes: dict[str, int] = {}
    for tensor in {address(each): each for each in tensors_in((models.target, models.proposer))}.values():
        name = type_name(tensor.dtype)
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return sizes


def _draft(settings: Settings, models: LoadedModels) -> DraftPart | None:
    spec = settings.spec
    if spec.width == 1:
        return None
    path = spec.draft_path
    return DraftPart(
        method=spec.method,
        path=path,
        numbers=(spec.num_steps, spec.topk, spec.width),
        stored={} if path is None else stored_formats(Path(path), spec.draft_load_format),
        fits=draft_fits(models, spec),
    )


def _text(settings: Settings, formats: Formats) -> TextPart:
    """Raises: CheckpointError if tokenizer or template cannot be read."""
    files, server = settings.model.files, settings.server
    defaults = server.sampling_defaults.changes()
    if settings.skip_tokenizer_init or files.tokenizer_dir is None:
        return TextPart(
            tokenizer="none", has_chat_template=False, tool_calls="", reasoning="", sampling_defaults=defaults
        )
    codec = load_codec(Path(files.tokenizer_dir), files.chat_template)
    tool_calls, reasoning = formats(server, codec.chat_template)
    return TextPart(
        tokenizer=codec.name,
        has_chat_template=bool(codec.chat_template),
        tool_calls=tool_calls,
        reasoning=reasoning,
        sampling_defaults=defaults,
    )
