"""The states of a model's recurrent layers, one for each slot, and how a rejected guess leaves no trace in them.

A state cannot be rolled back, and one for every column of a window is too much memory. So a slot keeps the state before
its window, and the window's inputs. How many of them were accepted is known on the device when its next step runs: the
slot's length tells. That step first repeats the accepted ones, token by token, and only then runs its own window:

    position     p                 the state holds tokens 0..p - 1
    inputs       p  p+1  p+2 ..    of the last window's columns, none of which is in the state
    next step    begins at p + n   so n columns were accepted: they are repeated, and are in the state from then on

The host has no part in it, two steps may be in flight, and a slot that is left out of a step loses nothing. A request's
first chunk begins at 0 and finds an empty state, whatever its slot held. The rows of prompts are never rejected:
they are in the state at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # positions: prompts are computed by chunks that end at its multiples


@dataclass(frozen=True)
class StateShape:
    """The sizes of a slot's state. All recurrent layers of a model are alike."""

    num_layers: int
    conv_dim: int  # channels C of the short convolution
    kernel: int  # K, its width
    num_heads: int  # n, of values
    key_dim: int  # dk
    value_dim: int  # dv
    dtype: torch.dtype | None = None  # of the state; None: float32, or a wider type of the model
    num_gates: int = 2  # g, of each head: Gated DeltaNet's rate and decay

    @property
    def sizes(self) -> tuple[int, int, int, int, int, torch.dtype | None, int]:
        """Those of one layer."""
        heads = (self.num_heads, self.key_dim, self.value_dim)
        return self.conv_dim, self.kernel, *heads, self.dtype, self.num_gates

    @property
    def row_size(self) -> int:
        """Numbers R that a token brings: what is convolved, and the gates of each head."""
        return self.conv_dim + self.num_gates * self.num_heads

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What a state is stored in. `dtype`: the model's."""
        return self.dtype or torch.promote_types(dtype, torch.float32)

    def bytes_per_state(self, dtype: torch.dtype) -> int:
        """Of all layers: a state, and the convolution's last inputs."""
        size = self.num_heads * self.key_dim * self.value_dim
        inputs = max(self.kernel - 1, 0) * self.conv_dim
        return self.num_layers * (size * self.state_dtype(dtype).itemsize + inputs * dtype.itemsize)

    def bytes_per_column(self, dtype: torch.dtype) -> int:
        """Of all layers: the inputs of a window's column."""
        return self.num_layers * self.row_size * dtype.itemsize

    def bytes_per_slot(self, width: int, dtype: torch.dtype) -> int:
        """A state and the inputs of a window."""
        return self.bytes_per_state(dtype) + width * self.bytes_per_column(dtype)


NO_STATE = StateShape(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class LayerState:
    """What a layer keeps of S slots."""

    memory: Tensor  # [S, n, dk, dv], in the state's type
    inputs: Tensor  # [S, K - 1, C]: what was convolved last
    window: Tensor  # [S, W, R]: the rows of the last window
    position: Tensor  # [S] i64: tokens that are in `memory`; the window's first row is the next one

    def snapshot(self, slots: Tensor) -> "LayerState":
        """A copy of states without any window, whose columns may yet be rejected. Shapes: slots [B] i64."""
        return LayerState(self.memory[slots], self.inputs[slots], self.window[slots, :0], self.position[slots])

    def restore(self, slots: Tensor, copy: "LayerState") -> None:
        """Put copies into slots. Sync: never. Shapes: slots [B] i64."""
        self.memory[slots] = copy.memory
        self.inputs[slots] = copy.inputs
        self.position[slots] = copy.position


@dataclass(frozen=True)
class RecurrentState:
    """The states of all recurrent layers of one model, in their order."""

    layers: tuple[LayerState, ...]
    stacks: tuple[Tensor, ...] = ()
    """The same memory without windows: of all layers memory, inputs and position, [L, S, ..] each."""

    @classmethod
    def allocate(
        cls, shape: StateShape, num_slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> "RecurrentState":
        """Take the memory of `num_slots` slots whose windows have up to `width` columns. `dtype`: the model's."""
        layers, heads = shape.num_layers, (shape.num_heads, shape.key_dim, shape.value_dim)
        if not layers:
            return cls(())
        memory = torch.zeros(layers, num_slots, *heads, dtype=shape.state_dtype(dtype), device=device)
        inputs = torch.zeros(layers, num_slots, shape.kernel - 1, shape.conv_dim, dtype=dtype, device=device)
        window = torch.zeros(layers, num_slots, width, shape.row_size, dtype=dtype, device=device)
        position = torch.zeros(layers, num_slots, dtype=torch.int64, device=device)
        return cls(tuple(map(LayerState, memory, inputs, window, position)), (memory, inputs, position))

    def snapshot(self, slots: Tensor) -> tuple[LayerState, ...]:
        """See `LayerState.snapshot`, of every layer."""
        return tuple(layer.snapshot(slots) for layer in self.layers)

    def restore(self, slots: Tensor, copies: tuple[LayerState, ...]) -> None:
        """See `LayerState.restore`, of every layer."""
        for layer, copy in zip(self.layers, copies, strict=True):
            layer.restore(slots, copy)


@dataclass(frozen=True)
class StateSnapshots:
    """Copies of slots' states, from which prompts go on that begin alike.

    A copy has no window. It is made of a slot whose prompt goes on, so nothing of it can be rejected.
    """

    state: RecurrentState
    copies: tuple[Tensor, ...]  # of all layers memory, inputs and position, [L, N, ..] each

    @classmethod
    def allocate(cls, state: RecurrentState, count: int) -> "StateSnapshots":
        """Take the memory of `count` copies. It is written before it is read."""
        return cls(state, tuple(each.new_empty(len(each), count, *each.shape[2:]) for each in state.stacks))

    def take(self, snapshots: Mapping[int, int]) -> None:
        """Copy the states of slots. `snapshots`: by slot, where to. Sync: never."""
        for slot, snapshot in snapshots.items():
            for states, copies in zip(self.state.stacks, self.copies, strict=True):
                copies[:, snapshot].copy_(states[:, slot])

    def restore(self, snapshots: Mapping[int, int]) -> None:
        """Give slots the states that were copied. `snapshots`: by slot, which. Sync: never."""
        for slot, snapshot in snapshots.items():
            for states, copies in zip(self.state.stacks, self.copies, strict=True):
                states[:, slot].copy_(copies[:, snapshot])


NO_SNAPSHOTS = StateSnapshots(RecurrentState(()), ())
