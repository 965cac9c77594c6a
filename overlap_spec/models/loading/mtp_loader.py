"""Takes MTP layers, in any layout, from their target's checkpoint.

The checkpoint also has the target's own tensors, which this loader skips:

    model.mtp_layers.0.input_proj.weight  ->  layers.0.input_proj.weight
    model.layers.0.mlp.up_proj.weight     ->  target.model.layers.0.mlp.up_proj.weight
"""

from torch import Tensor

from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.mtp import MtpLayersWeights, MtpWeights, swapped_halves
from overlap_spec.models.drafts.mtp_layouts import OF_TARGET, MtpLayout
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.embedding import DraftInput
from overlap_spec.models.layers.linear import AnyLinear, Linear, make_linear
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.loading import llama_loader, parts
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets import latent, mimo_v2_flash, mixture, step3p5
from overlap_spec.models.targets.latent import LatentConfig
from overlap_spec.models.targets.llama_config import LlamaConfig
from overlap_spec.models.targets.mimo_v2_flash import MimoV2Config
from overlap_spec.models.targets.mixture import MixtureConfig
from overlap_spec.models.targets.reading import SLIDING
from overlap_spec.models.targets.step3p5_config import Step35Config
from overlap_spec.models.work import count_bytes

# Of checkpoints whose MTP layers are like their own layers.
LayerConfig = LlamaConfig | MixtureConfig | LatentConfig | MimoV2Config | Step35Config


def load_mtp(
    config: LayerConfig,
    layout: MtpLayout,
    checkpoint: Weights,
    target: LoadedTarget,
    target_ids: Tensor | None = None,
) -> MtpWeights:
    """Take the one MTP layer. `config`: that of the whole checkpoint.

    With `target_ids` [N] i64 it guesses only these tokens (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint has instead.
    """
    _check_against_target(config, target)
    if any(name.startswith("layers.1.") for name in checkpoint.names()):
        raise CheckpointError(
            f"{checkpoint.origin}: it has several MTP layers, one for each guess: --enable-multi-layer-eagle runs them"
        )
    head, ids = parts.mapped_head(target, target_ids)
    weights = _load_layer(config, layout, checkpoint, 0, target, head, ids)
    _finish(checkpoint)
    return weights


def load_mtp_layers(
    config: LayerConfig, layout: MtpLayout, checkpoint: Weights, target: LoadedTarget, num_layers: int
) -> MtpLayersWeights:
    """Take the first `num_layers` MTP layers, one for each guess. `config` is that of the whole checkpoint.

    Raises: CheckpointError as `load_mtp` does; ConfigError if there are fewer than `num_layers`.
    """
    _check_against_target(config, target)
    found = {name.split(".")[1] for name in checkpoint.names() if name.startswith("layers.")}
    if found and len(found) < num_layers:  # random weights have as many as needed
        raise ConfigError(
            "speculative_num_steps",
            f"{checkpoint.origin} has {len(found)} MTP layers, one for each draft step of --enable-multi-layer-eagle:"
            f" give at most {len(found)}, not {num_layers}",
        )
    shared, ids = parts.mapped_head(target, None)
    layers = []
    for index in range(num_layers):
        name, shape = f"layers.{index}.{layout.head}.weight", (shared.out_features, shared.in_features)
        head = shared if layout.head is None else Linear(checkpoint.take(name, shape))
        layers.append(_load_layer(config, layout, checkpoint, index, target, head, ids))
    checkpoint.skip(*(name for name in checkpoint.names() if _is_layer_from(name, num_layers)))
    _finish(checkpoint)
    return MtpLayersWeights(tuple(layers), layout.chained)


def _load_layer(
    config: LayerConfig,
    layout: MtpLayout,
    checkpoint: Weights,
    index: int,
    target: LoadedTarget,
    head: AnyLinear,
    ids: Tensor,
) -> MtpWeights:
    """Take layer `index`, and skip its copies of the target's tensors."""
    prefix, hidden = f"layers.{index}", config.hidden_size
    names = (layout.token_norm, layout.hidden_norm, layout.norm)
    token_norm, hidden_norm, norm = (_load_norm(config, checkpoint, f"{prefix}.{name}") for name in names)
    weight = take_matrix(checkpoint, f"{prefix}.{layout.fc}", (hidden, 2 * hidden))
    fc = make_linear(swapped_halves(weight) if layout.hidden_first else weight)
    layer = _load_inner(config, layout, checkpoint, index)
    checkpoint.skip(*(f"{prefix}.{name}" for name in layout.copies))
    own = count_bytes((token_norm, hidden_norm, fc, layer, norm, ids))
    own += 0 if head is target.head else head.num_bytes
    inputs = DraftInput(target.embedding, token_norm, hidden_norm)
    return MtpWeights(target.embedding, inputs, fc, layer, norm, head, ids, own, layout.embeds_first)


def _load_norm(config: LayerConfig, checkpoint: Weights, name: str) -> Norm:
    if isinstance(config, Step35Config):
        return step3p5.load_norm(config, checkpoint, name, config.hidden_size)
    return llama_loader.load_norm(config, checkpoint, name)


def _load_inner(config: LayerConfig, layout: MtpLayout, checkpoint: Weights, index: int) -> PreNormLayer:
    """The layer like the target's own: of a mixture, one that has experts."""
    if isinstance(config, Step35Config):
        return step3p5.load_layer(config, checkpoint, index, config.num_layers + index)
    if isinstance(config, MimoV2Config):
        return mimo_v2_flash.load_layer(config, checkpoint, index, SLIDING, sparse=False)
    if isinstance(config, LatentConfig):
        return latent.load_layer(config, checkpoint, index, sparse=True)
    if isinstance(config, MixtureConfig):
        return mixture.load_sparse_layer(config, checkpoint, index)
    window = next((window for window in config.windows if window is not None), None) if layout.windowed else None
    shape = config.attention_shape(window)
    return llama_loader.load_layer(config, checkpoint, index, shape, config.hidden_size, "input_layernorm")


def _finish(checkpoint: Weights) -> None:
    """Skip the target's tensors, which another loader takes, and check that no other tensor is left."""
    checkpoint.skip(*(name for name in checkpoint.names() if name.startswith(OF_TARGET)))
    parts.finish(checkpoint)


def _is_layer_from(name: str, first: int) -> bool:
    return name.startswith("layers.") and int(name.split(".")[1]) >= first


def _check_against_target(config: LayerConfig, target: LoadedTarget) -> None:
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
