"""Joins a llama target and an MTP layer trained for it into a MiMo checkpoint, which is how they are published.

The target's tensors are written as they are dequantised, in float32 (0.5 GB for the default target).
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.hub import resolve_model
from overlap_spec.models.loading.gguf_source import GgufSource
from overlap_spec.models.loading.loader import read_target_config


def merge(target: ModelFiles, layer: Path, directory: Path) -> ModelFiles:
    """`target`: of a .gguf; `layer`: a directory with the layer's tensors alone and a config of the target's sizes."""
    config = read_target_config(target)
    mimo = json.loads((layer / "config.json").read_text())
    assert (mimo["hidden_size"], mimo["vocab_size"]) == (config.hidden_size, config.vocab_size)
    source = GgufSource(Path(target.weights), config)
    tensors = {f"model.{name}": source.read(name).contiguous() for name in source.shapes()}
    for index in range(config.num_layers):
        for part, count in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            bias = torch.zeros(count * config.head_dim)
            tensors[f"model.layers.{index}.self_attn.{part}_proj.bias"] = bias
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors | load_file(layer / "model.safetensors"), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(mimo | {"num_hidden_layers": config.num_layers}))
    return resolve_model(EngineConfig(model_path=str(directory), skip_tokenizer_init=True))
