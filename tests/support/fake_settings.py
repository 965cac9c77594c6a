"""Settings for tests that start processes without a model."""

from overlap_spec.config import (
    ApiKeys,
    CacheSettings,
    LinkSettings,
    ModelFiles,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SpecSettings,
)

FILES = ModelFiles(
    weights="/nowhere",
    config={"architectures": ["LlamaForCausalLM"]},
    tokenizer_dir=None,
    eos_token_ids=(2,),
    context_length=64,
    vocab_size=32,
)


def fake_settings() -> Settings:
    """The smallest settings that make sense."""
    return Settings(
        model=ModelSettings(name="tiny", files=FILES, dtype="float64", device="cpu", max_len=64),
        spec=SpecSettings(method="NONE", draft_path=None, num_steps=0, topk=0, width=1),
        cache=CacheSettings(page_size=4, max_total_tokens=128, mem_fraction=0.88, prefix_cache=True),
        scheduler=SchedulerSettings(max_running_requests=4, depth=2, chunk_tokens=None, seed=1),
        server=ServerSettings(host="127.0.0.1", port=0, keys=ApiKeys()),
        link=LinkSettings(client_endpoint=None, api_key=None),
        skip_tokenizer_init=True,
        log_level="info",
        num_threads=1,
    )
