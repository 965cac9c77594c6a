"""Takes an MTP layer, in any layout, from its target's checkpoint. Not here: opening files, and running.

The target's own tensors are beside it, and are left alone here:

    model.mtp_layers.0.input_proj.weight  ->  layers.0.input_proj.weight
    model.layers.0.mlp.up_proj.weight     ->  target.model.layers.0.mlp.up_proj.weight
"""

from dataclasses import replace

from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models import llama_loader
from overlap_spec.models.checkpoint import Weights
from overlap_spec.models.eagle_loader import mapped_head
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers import linear_map
from overlap_spec.models.llama import count_bytes
from overlap_spec.models.llama_config import LlamaConfig
from overlap_spec.models.mtp import MtpWeights, swapped_halves
from overlap_spec.models.mtp_layouts import OF_TARGET, MtpLayout


def load_mtp(
    config: LlamaConfig,
    layout: MtpLayout,
    checkpoint: Weights,
    target: LoadedTarget,
    target_ids: Tensor | None = None,
) -> MtpWeights:
    """Take the one MTP layer. `config` is that of the whole checkpoint.

    With `target_ids` [N] i64 it guesses among these tokens alone (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint has instead.
    """
    _check_against_target(config, target)
    names = checkpoint.names()
    if any(name.startswith("layers.1.") for name in names):
        raise CheckpointError(
            f"{checkpoint.origin}: it has several MTP layers, one for each guess (--enable-multi-layer-eagle),"
            " which is not supported yet; only one layer, reused, is"
        )
    config = replace(config, num_layers=1, windows=(None,))
    prefix, hidden = "layers.0", config.hidden_size
    token_norm = llama_loader.load_norm(config, checkpoint, f"{prefix}.{layout.token_norm}")
    hidden_norm = llama_loader.load_norm(config, checkpoint, f"{prefix}.{layout.hidden_norm}")
    weight = checkpoint.take(f"{prefix}.{layout.input_map}.weight", (hidden, 2 * hidden))
    input_map = linear_map(swapped_halves(weight) if layout.hidden_first else weight)
    layer = llama_loader.load_layer(config, checkpoint, 0, hidden, "input_layernorm")
    norm = llama_loader.load_norm(config, checkpoint, f"{prefix}.{layout.norm}")
    checkpoint.skip(*(name for name in names if name.startswith(OF_TARGET)))
    checkpoint.skip(*(f"{prefix}.{name}" for name in layout.copies))
    llama_loader.skip_derived(checkpoint)
    checkpoint.finish()
    head, ids = mapped_head(target, target_ids)
    own = count_bytes((token_norm, hidden_norm, input_map, layer, norm, ids))
    own += 0 if head.weight is target.head.weight else head.weight.nbytes
    return MtpWeights(
        config,
        target.embedding,
        token_norm,
        hidden_norm,
        input_map,
        layer,
        norm,
        head,
        ids,
        own,
        layout.embeds_first,
    )


def _check_against_target(config: LlamaConfig, target: LoadedTarget) -> None:
    sizes = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
    }
    for key, (found, expected) in sizes.items():
        if found != expected:
            raise CheckpointError(
                f"{config.origin}: {key} is {found}, but the target's is {expected}: an MTP layer shares its target's"
                " embedding and head"
            )
