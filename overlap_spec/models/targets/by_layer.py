"""What decoders share whose layers are not alike: each is read from the config and loaded by itself."""

from collections.abc import Iterable
from dataclasses import dataclass

from overlap_spec.models.drafts.mtp_layouts import is_draft_part
from overlap_spec.models.layers.decoder import DecoderLayer
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import finish, take_embedding, take_head
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.mixture import ExpertSizes
from overlap_spec.models.targets.reading import DecoderConfig, OfDecoder


@dataclass(frozen=True, kw_only=True)
class ByLayerConfig(OfDecoder):
    """A decoder, some layers of which have experts."""

    decoder: DecoderConfig
    experts: ExpertSizes
    sparse: tuple[bool, ...]  # by layer
    origin: str  # the file, for messages


def load_by_layer(
    config: ByLayerConfig, checkpoint: Weights, layers: Iterable[DecoderLayer], norm: Norm
) -> DecoderWeights:
    """Take the rest of the weights. `layers` are taken one after another, `norm` is the final one.

    Layers that draft are left to their own loader. Raises: CheckpointError naming file, tensor, found and expected.
    """
    embedding = take_embedding(checkpoint, config.vocab_size, config.hidden_size)
    loaded = tuple(layers)
    head = take_head(checkpoint, embedding, config.decoder.tie_word_embeddings)
    checkpoint.skip(*(name for name in checkpoint.names() if is_draft_part(name, config.num_layers)))
    finish(checkpoint)
    return DecoderWeights(embedding, loaded, norm, head)
