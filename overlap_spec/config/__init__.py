"""The configuration: `EngineConfig` (the user's flags), `Settings` (the resolved values), and the environment."""

from overlap_spec.config.environment import (
    asked_otlp_protocol as asked_otlp_protocol,
    asked_threads as asked_threads,
    asks_for_spec_v2 as asks_for_spec_v2,
    cache_directory as cache_directory,
    child_environment as child_environment,
    forces_greedy_verify as forces_greedy_verify,
    isolated_environment as isolated_environment,
    kernel_cache as kernel_cache,
    own_environment as own_environment,
    refuse_multicast as refuse_multicast,
    waiting_fact as waiting_fact,
)
from overlap_spec.config.flags import (
    DUMMY as DUMMY,
    EngineConfig as EngineConfig,
)
from overlap_spec.config.methods import (
    NGRAM as NGRAM,
    PLAIN as PLAIN,
    SMOLLM2_SPEC as SMOLLM2_SPEC,
    facts_of as facts_of,
    is_own_method as is_own_method,
)
from overlap_spec.config.settings import (
    FORCE_GREEDY_NGRAM as FORCE_GREEDY_NGRAM,
    LOSSY as LOSSY,
    MIB as MIB,
    OPERATOR as OPERATOR,
    AcceptSettings as AcceptSettings,
    ApiKeys as ApiKeys,
    AttentionSettings as AttentionSettings,
    AuditSettings as AuditSettings,
    CacheSettings as CacheSettings,
    HttpLimits as HttpLimits,
    IsolationSettings as IsolationSettings,
    LinkSettings as LinkSettings,
    Machine as Machine,
    ModelFiles as ModelFiles,
    ModelSettings as ModelSettings,
    NgramSettings as NgramSettings,
    RecoverySettings as RecoverySettings,
    SamplingDefaults as SamplingDefaults,
    SchedulerSettings as SchedulerSettings,
    ServerSettings as ServerSettings,
    Settings as Settings,
    SpecSettings as SpecSettings,
    SupervisorSettings as SupervisorSettings,
    WidthRule as WidthRule,
    decode_settings as decode_settings,
    encode_settings as encode_settings,
    is_loopback as is_loopback,
)
from overlap_spec.config.speculation import (
    synthetic_acceptance as synthetic_acceptance,
)
