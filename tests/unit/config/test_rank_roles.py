"""Roles of ranks, and numbers of ranks that are refused by name."""

from typing import Any

import pytest

from overlap_spec.config import EngineConfig, Machine, ModelFiles, Settings, child_environment
from overlap_spec.config.ranks import rank_of, resolve_ranks, role_of, spin_of, threads_of, with_ranks, worker_roles
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError

FILES = ModelFiles(
    weights="/weights", config={}, tokenizer_dir="/tokenizer", vocab_size=128, context_length=1024, eos_token_ids=(0,)
)
CPU, FOUR = Machine(num_cores=8, has_cuda=False), Machine(num_cores=64, has_cuda=True, num_gpus=4)


def settle(machine: Machine = FOUR, **asked: Any) -> Settings:
    return resolve(EngineConfig(**asked), FILES, machine)[0]


def ranks_of(machine: Machine = FOUR, **asked: Any) -> int:
    return resolve_ranks(EngineConfig(**asked), "cuda" if machine.has_cuda else "cpu", machine, [])


def test_rank_0_is_the_worker_and_others_are_numbered() -> None:
    assert worker_roles(1) == ("worker",) and worker_roles(4) == ("worker", "worker-1", "worker-2", "worker-3")
    assert [rank_of(role) for role in worker_roles(4)] == [0, 1, 2, 3]
    assert rank_of(role_of(7)) == 7
    assert rank_of("scheduler") is None and rank_of("frontend") is None


def test_further_ranks_run_what_rank_0_runs() -> None:
    roles = {"frontend": "f", "scheduler": "s", "worker": "w"}
    assert with_ranks(roles, 1) == roles
    assert with_ranks(roles, 2) == roles | {"worker-1": "w"}
    assert with_ranks({"frontend": "f"}, 2) == {"frontend": "f"}


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 16])
def test_ranks_that_do_not_halve_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--tp-size: .*1, 2, 4, 8 ranks, got {ranks}"):
        ranks_of(tp_size=ranks)


def test_the_first_rank_without_a_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="--tp-size: rank 4 of 8 has no GPU: there are 4"):
        ranks_of(tp_size=8)
    assert [ranks_of(tp_size=count) for count in (1, 2, 4)] == [1, 2, 4]
    assert ranks_of(CPU, tp_size=8) == 8


def test_eagle3_is_divided_among_all_ranks_or_whole_on_each() -> None:
    for size in (1, 2):
        assert ranks_of(tp_size=2, speculative_algorithm="EAGLE3", speculative_draft_tp_size=size) == 2
    with pytest.raises(ConfigError, match="--speculative-draft-tp-size: .*1 or all 4 ranks, got 2; use 1"):
        ranks_of(tp_size=4, speculative_algorithm="EAGLE3", speculative_draft_tp_size=2)
    with pytest.raises(ConfigError, match="--speculative-draft-tp-size: each rank has all of .*, got 2; use 1"):
        ranks_of(tp_size=2, speculative_algorithm="STANDALONE", speculative_draft_tp_size=2)


def test_ranks_share_the_cores_and_one_core_more_is_needed_to_poll() -> None:
    assert (threads_of(CPU, 1), threads_of(CPU, 2), threads_of(Machine(num_cores=2, has_cuda=False), 4)) == (8, 4, 1)
    assert threads_of(Machine(num_cores=8, has_cuda=False, num_threads=3), 4) == 3, "the user's"
    for cores, ranks, polls in ((6, 1, True), (6, 2, False), (7, 2, True)):
        machine = Machine(num_cores=cores, has_cuda=True, num_gpus=2)
        assert (spin_of(machine, "cuda", ranks) > 0) is polls
    assert spin_of(CPU, "cpu", 1) == 0


def test_every_rank_has_a_workers_environment() -> None:
    settings = settle(CPU)
    assert child_environment(settings, "worker-1") == child_environment(settings, "worker")
    assert child_environment(settings, "scheduler")["OMP_NUM_THREADS"] == "1"


def test_workers_of_several_ranks_leave_multicast_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    several = child_environment(settle(CPU, tp_size=2), "worker-1")
    assert (several["NCCL_NVLS_ENABLE"], several["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in child_environment(settle(CPU), "worker")
