"""How many pages fit, and what is said when they do not."""

import pytest

from overlap_spec.config import CacheSettings
from overlap_spec.errors import ConfigError
from overlap_spec.worker.startup.memory_budget import Budget, num_pages

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
