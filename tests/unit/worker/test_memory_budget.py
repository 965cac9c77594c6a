"""How many pages fit, and what is said when they do not.

What memory goes to, and what each flag frees, by hand.
"""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from overlap_spec_kernels.attention.latent_attention import MOST_SCRATCH_BYTES
from support.ring import tiny_loaded
from support.tiny.models import tiny_config

from overlap_spec.config import AttentionSettings, CacheSettings, EngineConfig, Machine, ModelFiles, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError
from overlap_spec.messages import MemorySaving
from overlap_spec.models.interfaces import DraftLog
from overlap_spec.worker.startup import memory_budget as memory
from overlap_spec.worker.startup.geometry import demand_of, memory_facts, settle_geometry
from overlap_spec.worker.startup.memory_budget import Budget, Demand, GpuMemory, num_pages, savings

MIB = 1 << 20


def cache(max_total_tokens: int | None = None) -> CacheSettings:
    return CacheSettings(page_size=16, max_total_tokens=max_total_tokens, mem_fraction=0.88, prefix_cache=True)


def test_the_pool_fills_the_budget_less_the_dummy_page() -> None:
    assert num_pages(cache(), 1024, Budget(MIB, "1 MiB"), 16) == 64  # 64 pages of 16 KiB, one of them the dummy


def test_an_asked_size_is_rounded_up_to_pages() -> None:
    assert num_pages(cache(100), 1024, Budget(MIB, "1 MiB"), 16) == 7 + 1


def test_too_much_says_how_much_is_missing_and_what_to_turn() -> None:
    with pytest.raises(ConfigError, match=r"1 MiB are missing .* --max-total-tokens") as caught:
        num_pages(cache(2000), 1024, Budget(MIB, "1 MiB"), 16)
    assert caught.value.field == "max_total_tokens"


def test_a_budget_below_one_request_names_the_fraction() -> None:
    with pytest.raises(ConfigError, match="--mem-fraction-static") as caught:
        num_pages(cache(), 1024, Budget(20 * 1024, "20 KiB"), 64)
    assert caught.value.field == "mem_fraction_static"


def test_a_pool_below_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64"):
        num_pages(cache(16), 1024, Budget(MIB, "1 MiB"), 64)


DEMAND = Demand(
    target_weights=1000 * MIB,
    draft_weights=100 * MIB,
    target_kv=4096,
    draft_kv=1024,
    vocab_size=MIB // 8,  # a row of logits, twice in float32, is 1 MiB
    hidden_size=1024,
    itemsize=4,
    max_running_requests=8,
    width=32,
    chunk=4096,
    scratch_rows=1024,  # of 1 MiB together
    is_tree=True,
    slot_bytes=MIB // 2,
)


def test_the_sum() -> None:
    assert DEMAND.workspace == (8 * 32 + 512 + 24 * 16 + 4) * MIB  # counts of tokens take 4
    assert DEMAND.scratch == 9 * MIB, "the dummy slot's too"
    assert DEMAND.kept == 9 * MIB // 2, "the dummy slot's too"
    assert DEMAND.num_bytes == (1100 + 1156 + 9) * MIB + DEMAND.kept


def test_placed_slots_have_states_too() -> None:
    demand = replace(DEMAND, state=3 * MIB, state_column=MIB, placed_slots=2)
    assert demand.states == (8 + 1 + 2) * (3 + 32) * MIB and demand.beside - DEMAND.beside == demand.states


def test_a_mask_of_a_grammar_for_every_column_of_every_window_is_part_of_the_workspace() -> None:
    masked = replace(DEMAND, column_bytes=MIB // 4)
    assert masked.workspace - DEMAND.workspace == 9 * 32 * MIB // 4, "in words of 4 bytes, the dummy slot's too"


def test_what_each_gives_back_in_the_order_of_the_guide() -> None:
    assert {saving.flag: saving.num_bytes // MIB for saving in savings(DEMAND)} == {
        "--speculative-num-draft-tokens 16": 8 * 16,
        "--speculative-eagle-topk 1": 9,
        "--max-running-requests 4": 4 * 32 + 4 + 2 + 2,  # logits, the trees' rows, what features keep, counts
        "--kv-cache-dtype fp8_e4m3": 6,  # three quarters of the trees' rows, and of each token
        "--dtype bfloat16": 550 + 192 + 4,  # half of the weights, the longest chunk and the trees' rows
        "--chunked-prefill-size 2048": 192,
        "--speculative-algorithm NONE": 100 + 8 * 31 + 9,
    }
    assert list(savings(DEMAND))[0].flag == "--speculative-num-draft-tokens 16"
    assert "--kv-cache-dtype fp8_e4m3 (6 MiB and 3840 bytes a token)" in map(str, savings(DEMAND))
    assert "--dtype bfloat16 (746 MiB and 2560 bytes a token)" in map(str, savings(DEMAND))


def test_a_narrower_window_is_named_by_the_flag_that_has_an_effect() -> None:
    """The draft tokens of a chain follow its steps, and those of a chain with a branch of n-grams both."""
    chain = replace(DEMAND, scratch_rows=0, is_tree=False, width=6)
    assert savings(chain)[0] == MemorySaving("--speculative-num-steps 3", 8 * 2 * MIB, 0)
    fused = replace(chain, is_tree=True, width=4 + 7, branch=7, branch_flag="--speculative-fuse-ngram")
    assert savings(fused)[0] == MemorySaving("--speculative-fuse-ngram 4", 8 * 3 * MIB, 0)
    short = replace(fused, width=8 + 2, branch=2)
    assert savings(replace(short, width=9 + 7, branch=7))[0].flag == "--speculative-fuse-ngram 1", "9 are the chain's"
    least = replace(short, width=9, branch=1)
    assert savings(least)[0].flag == "--max-running-requests 4"


def test_a_shorter_log_of_n_grams_gives_nine_tenths_back() -> None:
    log = DraftLog(300 * MIB, 10_000_000, "--speculative-ngram-capacity")
    ngram = replace(DEMAND, draft_weights=0, draft_kv=0, scratch_rows=0, draft_log=log)
    assert {saving.flag: saving.num_bytes // MIB for saving in savings(ngram)} == {
        "--speculative-num-draft-tokens 16": 8 * 16,
        "--speculative-ngram-capacity 1000000": 270,
        "--max-running-requests 4": 4 * 32 + 2 + 2,
        "--kv-cache-dtype fp8_e4m3": 0,
        "--dtype bfloat16": 500 + 192,
        "--chunked-prefill-size 2048": 192,
        "--speculative-algorithm NONE": 300 + 8 * 31,
    }


def test_what_is_turned_down_already_gives_nothing_back() -> None:
    least = replace(
        DEMAND, width=1, draft_weights=0, draft_kv=0, scratch_rows=0, max_running_requests=4, itemsize=2, chunk=2048
    )
    assert [saving.flag for saving in savings(least)] == ["--kv-cache-dtype fp8_e4m3"]
    assert savings(replace(least, kv_itemsize=1)) == []


def test_pages_of_8_bits_are_as_large_in_any_dtype() -> None:
    narrow = replace(DEMAND, kv_itemsize=1, target_kv=1024, draft_kv=256)
    assert "--dtype bfloat16 (742 MiB)" in map(str, savings(narrow))


def settled(has_cuda: bool, **flags: Any) -> Settings:
    files = ModelFiles(
        weights="/none", config=tiny_config(), tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
        preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
    )  # fmt: skip
    return resolve(EngineConfig(**flags), files, Machine(num_cores=2, has_cuda=has_cuda))[0]


def test_a_gpu_that_is_too_small_says_what_to_turn_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.torch.cuda, "mem_get_info", lambda: (600 * MIB, 1000 * MIB))
    models = tiny_loaded(1, 3, torch.float32)
    with pytest.raises(ConfigError) as caught:
        settle_geometry(settled(True, dtype="float32"), models, torch.device("cuda"))
    for words in (
        "--mem-fraction-static: ",
        "MiB are missing",
        "raise --mem-fraction-static, of which 0.01 are 10 MiB",
        "turn down, in this order: --speculative-num-steps 1 (0 MiB), --max-running-requests 4",
    ):
        assert words in str(caught.value)


def test_the_table_says_what_memory_goes_to() -> None:
    facts = memory_facts(DEMAND, 50 * MIB).report()
    assert facts["memory"] == (
        "1000 MiB of target weights, 100 MiB of draft weights, 1156 MiB of workspace, 9 MiB for trees,"
        " 4 MiB of features, 50 MiB of CUDA graphs; 5120 bytes of KV cache a token"
    )
    assert str(facts["to save memory"]).startswith("--speculative-num-draft-tokens 16 (128 MiB), ")


def test_torch_attention_has_shorter_chunks() -> None:
    models = tiny_loaded(1, 3, torch.float32)
    attention = AttentionSettings(target_torch=True)
    settings = settled(True, dtype="float32")
    long = msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, max_len=9000))
    assert demand_of(long, models).chunk == 8192
    assert demand_of(msgspec.structs.replace(long, attention=attention), models).chunk == 512


def test_the_demand_is_that_of_the_models() -> None:
    models = tiny_loaded(1, 3, torch.float32)
    demand = demand_of(settled(False), models)
    assert (
        demand.target_weights == models.target.num_bytes and demand.draft_weights == models.proposer.profile.num_bytes
    )
    assert (demand.target_kv, demand.draft_kv) == (2 * 2 * 2 * 16 * 4, 2 * 1 * 2 * 16 * 4)
    assert (demand.width, demand.max_running_requests, demand.chunk, demand.itemsize) == (4, 48, 512, 4)


def test_the_scratch_of_latent_attention_is_no_pages_memory() -> None:
    """Of the target's, and of a layer of its own kind that drafts; other heads of a draft have none."""
    found = []
    for method in ("NEXTN in DeepSeek's layout", "EAGLE3"):
        models = tiny_loaded(1, 3, torch.float32, family="glm 4.7 flash", method=method)
        demand = demand_of(settled(False), models)
        found.append(demand.workspace - replace(demand, attention_scratch=0).workspace)
    assert found == [2 * MOST_SCRATCH_BYTES, MOST_SCRATCH_BYTES]
    assert demand_of(settled(False), tiny_loaded(1, 3, torch.float32)).attention_scratch == 0


@pytest.mark.parametrize(("memory_mib", "rows"), [(600, 16), (900, 32), (1400, 64), (5000, 64)])
def test_draft_rows_that_wait_take_little_of_the_memory_for_pages(memory_mib: int, rows: int) -> None:
    """Whole catch-ups, and one at least. Their bytes are not the pages'."""
    settings, models = settled(True, dtype="float32", max_running_requests=512), tiny_loaded(1, 3, torch.float32)
    held = GpuMemory(memory_mib * MIB, 0)
    geometry = settle_geometry(settings, models, torch.device("cuda"), held)
    assert (geometry.most_deferred, geometry.max_deferred) == (rows, rows)
    demand, bytes_of_rows = demand_of(settings, models), 513 * rows * 2 * 32 * 4  # of two aux layers
    beside = demand.workspace + demand.scratch + demand.draft_probs + demand.kept
    left = int(memory_mib * MIB * settings.cache.mem_fraction) - beside
    assert rows == 16 or bytes_of_rows <= left / 64
    page_bytes = demand.per_token * geometry.page_size
    assert geometry.num_pages == (left - bytes_of_rows) // page_bytes


@pytest.mark.parametrize(("family", "deterministic"), [("qwen3 next", True), ("qwen3 next", False), ("llama", True)])
def test_steps_of_output_alone_are_where_layers_recur_in_one_order(family: str, deterministic: bool) -> None:
    settings, models = settled(True, dtype="float32"), tiny_loaded(1, 3, torch.float32, family=family)
    settings = msgspec.structs.replace(
        settings, model=msgspec.structs.replace(settings.model, deterministic=deterministic)
    )
    geometry = settle_geometry(settings, models, torch.device("cuda"), GpuMemory(5000 * MIB, 0))
    assert geometry.has_drawn == (deterministic and family == "qwen3 next")


def test_rounding_weights_while_loading() -> None:
    """Half of the linears' memory, less the buffer that the widest is dequantised into."""
    found = savings(replace(DEMAND, itemsize=2, roundable=600 * MIB, widest=100 * MIB))
    by_flag = {saving.flag: saving for saving in found}
    assert by_flag["--quantization fp8"].num_bytes == 200 * MIB and by_flag["--quantization fp8"].kv_bytes == 0
    assert "--quantization fp8" not in {saving.flag for saving in savings(DEMAND)}
