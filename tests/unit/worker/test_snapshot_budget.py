"""How many snapshots of recurrent states there is room for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from support.fake_settings import fake_settings

from overlap_spec.config import Settings
from overlap_spec.errors import ConfigError
from overlap_spec.models.kv_cache import KVShape
from overlap_spec.models.recurrent_state import StateShape
from overlap_spec.worker.startup.geometry import num_snapshots
from overlap_spec.worker.startup.memory_budget import CPU_POOL_BYTES, Budget

STATE = StateShape(num_layers=2, conv_dim=64, kernel=4, num_heads=4, key_dim=256, value_dim=256)
EACH = STATE.bytes_per_state(torch.float32)
GPU = torch.device("cuda")


def found(device: torch.device, budget: int, shape: StateShape = STATE, **cache: Any) -> int:
    settings: Settings = fake_settings()
    settings = msgspec.structs.replace(settings, cache=msgspec.structs.replace(settings.cache, **cache))
    scheduler = msgspec.structs.replace(settings.scheduler, max_running_requests=7)
    model = msgspec.structs.replace(settings.model, dtype="float32")
    settings = msgspec.structs.replace(settings, scheduler=scheduler, model=model)
    models: Any = SimpleNamespace(target=SimpleNamespace(kv_shape=KVShape(1, 1, 8, state=shape)))
    of_slots = 8 * shape.bytes_per_slot(settings.spec.width, torch.float32)
    return num_snapshots(settings, models, Budget(budget, "here"), device, of_slots)


def test_states_take_their_share_of_a_gpu_and_snapshots_what_slots_leave_of_it() -> None:
    slots = 8 * STATE.bytes_per_slot(fake_settings().spec.width, torch.float32)
    total = 40 * EACH + slots
    assert found(GPU, 40 * EACH, state_ratio=1.0) == (total // 2 - slots) // EACH
    assert found(GPU, 40 * EACH, state_ratio=3.0) == (total * 3 // 4 - slots) // EACH


def test_on_a_cpu_they_take_a_share_of_another_gibibyte() -> None:
    assert found(torch.device("cpu"), 0, state_ratio=1.0) == CPU_POOL_BYTES // 2 // EACH


def test_a_number_of_states_is_of_slots_and_snapshots() -> None:
    assert found(GPU, 0, max_states=9) == 2


def test_there_are_none_without_a_use() -> None:
    assert found(GPU, 1 << 40, replace(STATE, num_layers=0)) == 0
    assert found(GPU, 1 << 40, prefix_cache=False) == 0


def test_no_room_for_one_is_an_error_by_name() -> None:
    with pytest.raises(ConfigError, match="--mamba-full-memory-ratio: 0.5 leaves .* bytes .* a snapshot takes"):
        found(GPU, EACH, state_ratio=0.5)
