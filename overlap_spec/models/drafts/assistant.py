"""The assistant of a Gemma 4 target: a few layers with queries alone, which attend to keys and values of the target.

    target's final hidden state --.
    target's embedding(token) ----+--> pre_projection --> layers --> norm --+--> head --> guess
                                                                            '--> post_projection --> next hidden state

Each layer reads what the target's last layer of its kind, with a window or without, attends to. Nothing is written, so
all guesses of a step are made at the position of the last token that the target has read, and see the same keys.

Some assistants have centroids: a row computes the logits of the tokens of its best centroids alone, and all others lie
one below the least of these. Facts: transformers 5.17, models/gemma4_assistant; sglang, srt/models/gemma4_mtp.py,
commit 19cd23daca2fd24870bc5c1bed767cc7f04e4101, and srt/speculative/frozen_kv_mtp_utils.py, commit
077454f4271e2794cfcba35149f0903810413761, for the position.

    pre_projection [h, 2 H], post_projection [H, h], model.embed_tokens [V, h], which is the head
    model.layers.i.* and model.norm as the target's, without keys and values
    masked_embedding.centroids [C, h], masked_embedding.token_ordering [V] i64: the tokens by centroid
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from overlap_spec_kernels import Normed, largest_columns, normalised
from torch import Tensor

from overlap_spec.config.speculation import ASSISTANTS, DraftKind
from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import DraftProfile, LazyLogits, LoadedTarget, RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import AttentionShape, PagedAttention
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import run_layers
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.gemma4 import ScaledLayer
from overlap_spec.models.layers.linear import AnyLinear, Linear
from overlap_spec.models.layers.norm import WideRMSNorm
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import canonical_name, finish, take_linear
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.gemma4 import read_shapes
from overlap_spec.models.targets.gemma4_layers import take_dense, take_layer, take_norm
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader
from overlap_spec.models.work import ForwardWork, count_bytes, product_work, total_work


@dataclass(frozen=True, slots=True)
class CentroidHead:
    """A head that computes the logits of some tokens alone, which each row chooses."""

    matrix: Tensor  # [V, h]
    centroids: AnyLinear  # [C, h]
    tokens: Tensor  # [C, V / C] i64, of each centroid
    top_k: int  # centroids of a row

    @property
    def work(self) -> ForwardWork:
        """What a row reads: its centroids' tokens."""
        rows = self.top_k * self.tokens.shape[1]
        return self.centroids.work + product_work(rows * self.matrix[0].nbytes, rows * self.matrix.shape[1])

    def logits(self, x: Tensor) -> Tensor:
        """Shapes: [R, h] -> [R, V]. Each row's other tokens lie one below the least that it computes."""
        best = self.centroids(x).topk(self.top_k, dim=1).indices
        chosen = self.tokens[best].flatten(1)
        found = (self.matrix[chosen] @ x[:, :, None]).squeeze(2)
        found = found.float() if found.element_size() == 2 else found
        lowest = found.amin(1, keepdim=True) - 1.0
        return lowest.repeat(1, len(self.matrix)).scatter_(1, chosen, found)


@dataclass(frozen=True, slots=True)
class AssistantLogits:
    """`LazyLogits` of an assistant."""

    head: AnyLinear | CentroidHead
    rows: Tensor  # [R, h]

    def compute(self) -> Tensor:
        """Shapes: -> [R, V], float32 or wider."""
        return self.head.logits(self.rows)

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """See `LazyLogits`."""
        if isinstance(self.head, CentroidHead):
            return largest_columns(self.compute(), ids)
        return self.head.argmax(self.rows, ids)


@dataclass(frozen=True)
class AssistantWeights:
    """A loaded assistant (`LoadedDraft`), which has no KV cache. The embedding is the target's own."""

    embedding: Embedding  # [V, H]
    entry: AnyLinear  # [h, 2 H]
    layers: tuple[ScaledLayer, ...]
    sources: tuple[int, ...]  # by layer: the target's, whose keys and values it attends to
    norm: WideRMSNorm
    exit: AnyLinear  # [H, h]
    head: AnyLinear | CentroidHead

    @property
    def profile(self) -> DraftProfile:
        """Nothing is absorbed: only what was committed last is read."""
        layers = total_work(layer.work for layer in self.layers)
        return DraftProfile(
            num_bytes=count_bytes((self.entry, self.layers, self.norm, self.exit, self.head)),
            work=layers + self.entry.work + self.norm.work + self.exit.work + self.head.work.as_head(),
            draft_vocab_size=self.embedding.vocab_size,
            reads_hidden=False,
        )

    def attach(self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION) -> "Assistant":
        """Join weights and the target's own `cache`."""
        shapes = [layer.attention.shape for layer in self.layers]
        dtype = self.embedding.dtype
        return Assistant(self, PagedAttention(shapes, dtype, cache.of_layers(self.sources), num_positions, attention))


class Assistant:
    """`SharedKVModel` of Gemma 4."""

    def __init__(self, weights: AssistantWeights, attention: PagedAttention) -> None:
        self.target_ids = torch.arange(weights.embedding.vocab_size, device=weights.embedding.device)
        self._weights = weights
        self._attention = attention

    def forward(self, tokens: Tensor, hidden: Tensor, rows: RowBatch) -> Tensor:
        """Shapes: tokens [R] i64, hidden [R, H] -> [R, h]. Sync: never on CUDA."""
        weights = self._weights
        entered = weights.entry(torch.cat((weights.embedding(tokens), hidden), dim=1))
        x: Normed = weights.layers[0].input_norm.enter(entered)
        final, _ = run_layers(x, weights.layers, weights.norm, self._attention, rows)
        return normalised(final)

    def next_hidden(self, output: Tensor) -> Tensor:
        """What the next guess reads in the place of the target's hidden state. Shapes: [R, h] -> [R, H]."""
        return self._weights.exit(output)

    def logits(self, output: Tensor) -> LazyLogits:
        """Shapes: [R, h] -> logits [R, V]."""
        return AssistantLogits(self._weights.head, output)


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is an assistant's."""
    return bool(ASSISTANTS & set(map(str, config.get("architectures") or ())))


def load_assistant(source: DraftSource, target: LoadedTarget) -> AssistantWeights:
    """Load the assistant of this target.

    Raises: CheckpointError naming file, tensor or key, found and expected: an assistant of another target, too.
    """
    source.refuse_unless(DraftKind.ASSISTANT)
    if source.token_map is not None:
        raise CheckpointError(f"{source.path}: an assistant has a head of its own; leave the token map out")
    reader = ConfigReader(source.config(), source.origin)
    shapes, sources = _joined(reader, target)
    decoder, hidden = reader.decoder(tuple(shapes), tied=True), reader.size("hidden_size")
    checkpoint = source.weights(canonical_name)
    layers = tuple(
        take_layer(
            decoder,
            checkpoint,
            f"layers.{index}",
            shape,
            take_dense(checkpoint, f"layers.{index}", hidden, decoder.intermediate_size),
        )
        for index, shape in enumerate(shapes)
    )
    matrix = checkpoint.take("embed_tokens.weight", (target.vocab_size, hidden))
    checkpoint.skip("lm_head.weight")
    head: AnyLinear | CentroidHead = Linear(matrix)
    if reader.values.get("use_ordered_embeddings"):
        head = _take_centroids(reader, checkpoint, matrix, source.is_dummy)
    weights = AssistantWeights(
        target.embedding,
        take_linear(checkpoint, {"pre_projection": hidden}, 2 * target.hidden_size),
        layers,
        sources,
        take_norm(decoder, checkpoint, "norm", hidden),
        take_linear(checkpoint, {"post_projection": target.hidden_size}, hidden),
        head,
    )
    finish(checkpoint)
    return weights


def _joined(reader: ConfigReader, target: LoadedTarget) -> tuple[list[AttentionShape], tuple[int, ...]]:
    """The heads of each layer, and the target's layer that has its keys and values.

    Raises: CheckpointError naming the key if the assistant is another target's.
    """
    other = "the assistant is another target's"
    if not isinstance(target, DecoderWeights) or not isinstance(target.layers[0], ScaledLayer):
        raise CheckpointError(f"{reader.origin}: {other}: the target is no Gemma 4, whose keys and values it reads")
    sizes = {"backbone_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for key, expected in sizes.items():
        if (found := reader.size(key)) != expected:
            raise CheckpointError(f"{reader.origin}: {key}: found {found}, expected the target's {expected}: {other}")
    own = [layer.attention.shape for layer in target.layers]
    last = {shape.window is None: index for index, shape in enumerate(own) if isinstance(shape, AttentionShape)}
    shapes, sources = read_shapes(reader), []
    for index, shape in enumerate(shapes):
        kind = FULL if shape.window is None else SLIDING
        source = last.get(shape.window is None)
        if source is None:
            raise CheckpointError(f"{reader.origin}: layer {index} is {kind!r}, but no layer of the target: {other}")
        written = own[source]
        assert isinstance(written, AttentionShape)
        for what in ("num_kv_heads", "head_dim", "window"):
            found, expected = getattr(shape, what), getattr(written, what)
            if found != expected:
                raise CheckpointError(
                    f"{reader.origin}: layer {index}, {kind!r}: {what}: found {found}, expected {expected}, as the"
                    f" target's layer {source} has: {other}"
                )
        shapes[index] = replace(shape, reads=source, kv_scales=written.kv_scales)
        sources.append(source)
    return shapes, tuple(sources)


def _take_centroids(reader: ConfigReader, checkpoint: Weights, matrix: Tensor, is_dummy: bool) -> CentroidHead:
    count, top_k = reader.size("num_centroids"), reader.size("centroid_intermediate_top_k")
    vocab, hidden = matrix.shape
    if vocab % count or top_k > count:
        raise CheckpointError(
            f"{reader.origin}: num_centroids: found {count}, expected a divisor of vocab_size {vocab}, and at least"
            f" centroid_intermediate_top_k {top_k}"
        )
    name = "masked_embedding.token_ordering"
    order = torch.arange(vocab) if is_dummy else checkpoint.take_raw(name, (vocab,)).long()
    if not order.is_meta and not torch.equal(order.sort().values, torch.arange(vocab)):
        raise CheckpointError(
            f"{checkpoint.file_of(name)}: tensor {name}: expected each of {vocab} token ids once, found others"
        )
    centroids = take_linear(checkpoint, {"masked_embedding.centroids": count}, hidden)
    return CentroidHead(matrix, centroids, order.to(matrix.device).view(count, -1), top_k)
