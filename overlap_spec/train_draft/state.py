"""What a training run leaves: the checkpoint, and beside it what a later run goes on from.

The checkpoint is in the layouts that SpecForge writes, so that other engines load it too. EAGLE-3:
`LlamaForCausalLMEagle3` with `midlayer.*`, `d2t` and `t2d`. DFlash: `DFlashDraftModel` with Qwen3's layers; DSpark:
`DSparkDraftModel`, which has a Markov and a confidence head, too. Embedding and, for these two, the head are the
target's and not in the file. Layer ids name outputs: 0 is the residual after the first layer.

    DIR/config.json, DIR/model.safetensors     the draft, as engines load it
    DIR/resume/answers.pt                      the target's answers as token ids: no hidden state is kept
    DIR/resume/training.pt                     parameters in float32, the optimiser's state, the vocabulary

Each file is written beside its place and then renamed, so that a full disk or an end at any time loses nothing that was
there before.
"""

import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.eagle3 import default_aux_layers
from overlap_spec.models.loading.sources import load_plain
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.train_draft.head import Head, Tensors
from overlap_spec.train_draft.samples import Sample

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
COMMON = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "rms_norm_eps", "vocab_size")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def draft_numbers(target: Mapping[str, Any], origin: str) -> tuple[LlamaConfig, dict[str, Any]]:
    """The draft layer that goes with a target, and what a draft's config.json has of it, every size spelled out.

    Multimodal targets keep their numbers one level down. Raises: CheckpointError if a target has none of such a layer.
    """
    text = target.get("text_config") or target
    if (rank := text.get("kv_lora_rank")) is not None:
        raise CheckpointError(f"{origin}: kv_lora_rank: found {rank}, expected attention with keys, as drafts have")
    config = {key: text[key] for key in (*SIZES, *COMMON, *ROPE) if text.get(key) is not None}
    config.setdefault("rms_norm_eps", 1e-6)
    config |= {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
    llama = LlamaConfig.from_hf(config | {"num_hidden_layers": 1}, origin)
    config |= {"num_key_value_heads": llama.num_kv_heads, "head_dim": llama.head_dim, "num_hidden_layers": 1}
    return llama, config | {"initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}


def aux_layers_of(num_layers: int, kind: DraftKind, num_draft_layers: int = 1) -> tuple[int, ...]:
    """The layers whose outputs a draft reads, ascending. EAGLE-3's are SGLang's, where the target has so many."""
    if kind is DraftKind.EAGLE_3:
        return default_aux_layers(num_layers) or tuple(sorted({0, (num_layers - 1) // 2, num_layers - 1}))
    count, first, last = min(num_draft_layers, num_layers), 1, num_layers - 3
    if last - first + 1 < count:
        first, last = 0, num_layers - 1
    return tuple(round(first + step * (last - first) / max(count - 1, 1)) for step in range(count))


CONFIG, WEIGHTS = "config.json", "model.safetensors"
RESUME, ANSWERS, TRAINING = "resume", "answers.pt", "training.pt"
MIB = 1 << 20


def check_output(output: Path, resume: bool) -> None:
    """Raises: ConfigError naming the flag if a draft would be lost, or there is nothing to go on from."""
    if output.exists() and not output.is_dir():
        raise ConfigError("output", f"{output} is a file, expected a directory")
    has_answers = (output / RESUME / ANSWERS).is_file()
    if resume and not has_answers:
        raise ConfigError("resume", f"{output} has no {RESUME}/{ANSWERS} to go on from; leave --resume out")
    if not resume and (has_answers or (output / WEIGHTS).exists()):
        raise ConfigError("output", f"{output} has a draft already; give --resume, or another directory")
    try:
        (output / RESUME).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", f"{output}: {error.strerror or error}") from None


def check_space(output: Path, head: Head) -> None:
    """Raises: ConfigError if the disk has no room for parameters in 16 bits and in 32, and two moments of each."""
    found = shutil.disk_usage(output).free // MIB
    wanted = sum((2 + 3 * 4) * tensor.numel() for tensor in head.tensors.values()) // MIB + 1
    if found < wanted:
        raise ConfigError("output", f"{output}: the disk has {found} MiB left, {wanted} MiB are needed")


def write_draft(output: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write the checkpoint, numbers rounded to 16 bits. Raises: ConfigError; the one before is still there."""
    stored: Tensors = {}
    for name, each in tensors.items():
        dtype = torch.bfloat16 if each.is_floating_point() else each.dtype
        stored[name] = each.detach().to("cpu", dtype).contiguous()
    _write(output / WEIGHTS, save(stored, {"format": "pt"}))
    _write(output / CONFIG, (json.dumps(config, indent=1) + "\n").encode())


def write_training(output: Path, state: dict[str, Any]) -> None:
    """Raises: ConfigError as `write_draft`."""
    _write(output / RESUME / TRAINING, _packed(state))


def write_answers(output: Path, facts: dict[str, Any], samples: Sequence[Sample], held_out: Sequence[Sample]) -> None:
    """`facts`: what these answers are of. Raises: ConfigError as `write_draft`."""
    state = facts | {"samples": _flat(samples), "held_out": _flat(held_out)}
    _write(output / RESUME / ANSWERS, _packed(state))


def read_answers(output: Path, facts: dict[str, Any]) -> tuple[int, tuple[list[Sample], list[Sample]]]:
    """How many prompts were asked; samples, and those held out.

    Raises: CheckpointError naming the file; ConfigError naming which of the facts a run that goes on has changed.
    """
    state = _unpacked(output / RESUME / ANSWERS)
    for name, value in facts.items():
        if state[name] != value:
            raise ConfigError("resume", f"{output}: {name}: found {state[name]}, and now it is {value}")
    return state["num_asked"], (_samples(state["samples"]), _samples(state["held_out"]))


def read_training(output: Path) -> dict[str, Any]:
    """Empty if no training step was taken. Raises: CheckpointError naming the file."""
    path = output / RESUME / TRAINING
    return _unpacked(path) if path.is_file() else {}


def _flat(samples: Sequence[Sample]) -> tuple[Tensor, list[int], list[int]]:
    """All tokens, how many each sample has, where its answer starts."""
    tokens = torch.cat([torch.zeros(0, dtype=torch.int32), *(sample.tokens for sample in samples)])
    return tokens, [len(sample.tokens) for sample in samples], [sample.start for sample in samples]


def _samples(flat: tuple[Tensor, list[int], list[int]]) -> list[Sample]:
    tokens, lengths, starts = flat
    return [Sample(part.clone(), start) for part, start in zip(tokens.split(lengths), starts, strict=True)]


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(path: Path) -> dict[str, Any]:
    state = load_plain(path, "tables")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a table, found {type(state).__name__}")
    return state


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise ConfigError("output", f"{path}: {why}: {len(data) // MIB} MiB; what was saved is still there") from None
