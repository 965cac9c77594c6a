"""The engine's flags by subject, for `--help` and the documents: each in exactly one group."""

from overlap_spec.config.fields import config_fields

FIRST = (  # in `--help`, before the groups
    *("model_path", "host", "port", "api_key", "served_model_name", "context_length", "mem_fraction_static"),
    *("max_running_requests", "speculative_algorithm", "speculative_draft_model_path"),
)
DRAFT = (
    *("speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format"),
    *("speculative_draft_model_quantization", "speculative_token_map", "speculative_draft_window_size"),
    *("speculative_draft_attention_backend", "speculative_attention_mode"),
    *("speculative_moe_runner_backend", "speculative_moe_a2a_backend"),
)
VERIFICATION = (
    *("speculative_use_rejection_sampling", "speculative_accept_threshold_single"),
    *("speculative_accept_threshold_acc", "speculative_simulate_acc_len"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        *("model_path", "revision", "tokenizer_path", "load_format", "trust_remote_code", "served_model_name"),
        *("dtype", "quantization", "device", "tp_size", "context_length", "skip_tokenizer_init", "logit_processor"),
        "feature",
    ),
    "server": (
        *("host", "port", "api_key", "api_key_file", "admin_api_key", "sampling_defaults", "chat_template"),
        "trust_request_chat_template",
        *("tool_call_parser", "reasoning_parser", "cors_allow_origins", "allowed_hosts", "disable_ui", "zmq_endpoint"),
        "random_seed",
        *("http_header_timeout", "http_body_timeout", "max_connections", "max_connections_per_address"),
        *("recover", "max_recoveries", "watchdog_timeout", "drain_timeout", "log_level", "log_level_http"),
        *("otlp_traces_endpoint", "enable_trace"),
    ),
    "memory": (
        *("mem_fraction_static", "max_total_tokens", "max_running_requests", "chunked_prefill_size", "page_size"),
        "kv_cache_dtype",
        *("disable_radix_cache", "disable_overlap_schedule", "max_gap_ms", "enable_mixed_chunk"),
        *("schedule_policy",),
        *("max_queued_requests", "request_timeout", "first_token_timeout"),
    ),
    "graphs": (
        *("attention_backend", "disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs", "enable_torch_compile"),
        *("torch_compile_max_bs", "moe_runner_backend", "moe_a2a_backend"),
    ),
    "speculation": (
        *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
        *("speculative_adaptive", "speculative_adaptive_config", "enable_multi_layer_eagle"),
    ),
    "draft": DRAFT,
    "ngram": tuple(found.name for found in config_fields() if found.name.startswith("speculative_ngram_")),
    "verification": VERIFICATION,
    "audit": ("audit_rate", "audit_action", "audit_file"),
}
ONLY_SERVED = (  # read by the HTTP server alone, which `chat`, `verify` and most of `bench` do not start
    *("host", "port", "served_model_name", "tool_call_parser", "cors_allow_origins", "disable_ui"),
    *("allowed_hosts", "log_level_http"),
    *("http_header_timeout", "http_body_timeout", "max_connections", "max_connections_per_address"),
    *("otlp_traces_endpoint", "enable_trace"),
)
