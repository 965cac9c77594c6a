"""Reads the numbers of a config.json, and refuses by name what is not supported, before any weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.rope import RopeConfig

SLIDING, FULL = "sliding_attention", "full_attention"  # what `layer_types` calls layers with a window and without


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes that every decoder has."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    shapes: tuple[AttentionShape, ...]  # by layer

    @property
    def num_layers(self) -> int:
        return len(self.shapes)


class Sizes(Protocol):
    """What a target is asked of its decoder."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...


class OfDecoder:
    """The config of a target that is more than its decoder: asked of its sizes, it gives the decoder's."""

    decoder: Sizes

    @property
    def hidden_size(self) -> int:
        """Width of the residual."""
        return self.decoder.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.decoder.num_layers

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self.decoder.vocab_size

    @property
    def rms_norm_eps(self) -> float:
        """Of norms as wide as the residual."""
        return self.decoder.rms_norm_eps


@dataclass(frozen=True)
class ConfigReader:
    """A config.json and where it is, for messages. All methods raise CheckpointError naming file and key."""

    values: Mapping[str, Any]
    origin: str

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer. `default`: where the config has null, or no such key."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = "it is missing" if value is None else f"found {value!r}"
            raise CheckpointError(f"{self.origin}: {key} must be a positive integer, {found}")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer that is not negative. `default`: where the config has null, or no such key."""
        value = self.values.get(key)
        found = default if value is None else value
        return 0 if found == 0 and not isinstance(found, bool) else self.size(key, default)

    def norm_eps(self) -> float:
        """What norms add to their squares, a Llama's where the config does not say."""
        return float(self.values.get("rms_norm_eps") or 1e-6)

    def heads(self, default_head_dim: int | None = None) -> tuple[int, int, int]:
        """Query heads, key and value heads, head dim. `default_head_dim`: if not hidden size / heads."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"{self.origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if self.values.get("head_dim") is None and default_head_dim is None and hidden % heads:
            raise CheckpointError(
                f"{self.origin}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
            )
        return heads, kv_heads, self.size("head_dim", default_head_dim or hidden // heads)

    def window(self, default: int | None = None) -> int | None:
        """Keys that a row of a layer with a window sees."""
        window = self.values.get("sliding_window", default)
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise CheckpointError(f"{self.origin}: sliding_window must be null or a positive integer, found {window!r}")
        return window

    def layer_types(self) -> tuple[str, ...] | None:
        """Of each layer, `SLIDING` or `FULL`."""
        kinds, num_layers = self.values.get("layer_types"), self.size("num_hidden_layers")
        if kinds is None:
            return None
        if len(kinds) != num_layers or not set(kinds) <= {SLIDING, FULL}:
            raise CheckpointError(f"{self.origin}: layer_types must be {num_layers} times {SLIDING!r} or {FULL!r}")
        return tuple(kinds)

    def by_layer(self, key: str, words: tuple[object, object]) -> tuple[bool, ...] | None:
        """Of each layer, whether a list has the second of two words for it; None: there is no such list."""
        found, num_layers = self.values.get(key), self.size("num_hidden_layers")
        if found is None:
            return None
        if not isinstance(found, list | tuple) or len(found) != num_layers or not all(each in words for each in found):
            raise CheckpointError(f"{self.origin}: {key} must be {num_layers} times {words[0]!r} or {words[1]!r}")
        return tuple(each == words[1] for each in found)

    def listed(
        self, key: str, count: int, absent: Sequence[Any] | None = None, entries: Sequence[object] = ()
    ) -> Sequence[Any]:
        """A list with an entry for each layer, of which `count` are read. `entries`: what they may be; (): anything.

        `absent`: what is read where the config has null, or no such key; None: it must have the list.
        """
        given = self.values.get(key)
        found = absent if given is None else given
        is_list = isinstance(found, list | tuple) and len(found) >= count
        if found is None or not is_list or (entries and not all(each in entries for each in found)):
            what = " or ".join(map(repr, entries)) or "an entry"
            raise CheckpointError(f"{self.origin}: {key} must have {what} for each of {count} layers, found {found!r}")
        return found[:count]

    def ropes_by_kind(self) -> Mapping[str, Mapping[str, Any]]:
        """`rope_parameters` of layers that are `FULL` and `SLIDING`, as transformers 5 writes them; else nothing."""
        given = self.values.get("rope_parameters") or {}
        if not set(given) <= {FULL, SLIDING} or not all(isinstance(each, Mapping) for each in given.values()):
            raise CheckpointError(f"{self.origin}: rope_parameters must be objects for {FULL!r} and {SLIDING!r}")
        return given

    def rope(self, parameters: Mapping[str, Any], head_dim: int, part: float | None = None) -> RopeConfig:
        """By parameters that are not where the config of one kind of layers has them. `part`: see `from_hf`."""
        positions = self.values.get("max_position_embeddings")
        found = {"rope_parameters": parameters, "max_position_embeddings": positions}
        return RopeConfig.from_hf(found, head_dim, self.origin, part)

    def refuse_unless(self, key: str, *supported: object) -> None:
        """`supported`: values that the key may have, the first of them where the config does not say."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            raise CheckpointError(f"{self.origin}: {key} {value!r} is not supported; expected {supported[0]!r}")

    def decoder(self, shapes: tuple[AttentionShape, ...], tied: bool = False) -> DecoderConfig:
        """`tied`: where the config leaves open whether the head is the embedding."""
        given = self.values.get("tie_word_embeddings")
        return DecoderConfig(
            hidden_size=self.size("hidden_size"),
            intermediate_size=self.size("intermediate_size"),
            vocab_size=self.size("vocab_size"),
            rms_norm_eps=self.norm_eps(),
            tie_word_embeddings=tied if given is None else bool(given),
            shapes=shapes,
        )
