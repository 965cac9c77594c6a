"""The messages of each link: tagged, array-like, frozen msgspec structs, one union type per link.

A struct is named for where it goes. Times are seconds as float (monotonic clock of the machine), sizes are counts of
tokens unless the name tells otherwise. A new field goes last, with a default, so that old payloads still decode. Import
them from this package: each file holds the messages of one link, and an actor's inbox takes the union of its links.

    client ==Generate,Cancel,..==> tokenizer --Admit,Abort--> scheduler --StepPlan--> worker
    client <==TextDeltas,..======= tokenizer <--TokenDeltas-- scheduler <-StepResult- worker
"""

from overlap_spec.messages.audit import (
    BOUNDLESS,
    Audit,
    Audited,
    AuditFigures,
    AuditReply,
    AuditReport,
    Difference,
    GetAudit,
    StopSpeculating,
)
from overlap_spec.messages.base import (
    AbortReason,
    ErrorCode,
    Finish,
    FinishKind,
    Message,
    Phase,
    Usage,
)
from overlap_spec.messages.client import (
    Cancel,
    Detokenize,
    Detokenized,
    Flush,
    FlushDone,
    Generate,
    GetStats,
    LogProbs,
    Ping,
    Pong,
    Rejected,
    StatsReply,
    TextDeltas,
    ToClient,
    Tokenize,
    Tokenized,
    ToTokenizerFromClient,
)
from overlap_spec.messages.facts import (
    ActorFacts,
    CpuFacts,
    CudaFacts,
    EngineFacts,
    MemorySaving,
    SchedulerFacts,
    TokenizerFacts,
    WorkerFacts,
)
from overlap_spec.messages.health import READY, EngineHealth, EngineState
from overlap_spec.messages.request import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_GRAMMAR_BYTES,
    MAX_LISTED_LOG_PROBS,
    MAX_MARKER_TOKENS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOG_PROBS,
    MAX_WORD_TOKENS,
    ChatPrompt,
    Grammar,
    GrammarKind,
    LogProbParams,
    Prompt,
    Reasoning,
    SamplingParams,
    TextPrompt,
    Thinking,
    TokenPrompt,
)
from overlap_spec.messages.ring import (
    MOST_RESTING,
    NO_TOKEN,
    Abort,
    Admit,
    DropGrammar,
    EngineLimits,
    FlushCache,
    Flushed,
    GrammarFailed,
    GrammarReady,
    PrefillCosts,
    PrepareGrammar,
    Refused,
    ResetSlot,
    Resumed,
    SlotWork,
    Started,
    Stats,
    StepCosts,
    StepPlan,
    StepResult,
    TokenDeltas,
    WorkerReady,
)
from overlap_spec.messages.roofline import ForwardShape, Roofline
from overlap_spec.messages.speculation import MetricsLevel, Origin, Speculative, Verified
from overlap_spec.messages.supervisor import (
    ActorFailed,
    ActorProgress,
    ActorReady,
    Alive,
    Drained,
    LivenessProbe,
    Recover,
    Shutdown,
    ToSupervisor,
)

ToScheduler = (
    WorkerReady
    | StepResult
    | GrammarReady
    | GrammarFailed
    | Admit
    | Abort
    | FlushCache
    | Audit
    | StopSpeculating
    | LivenessProbe
    | Shutdown
)
ToWorker = StepPlan | PrepareGrammar | DropGrammar | FlushCache | LivenessProbe | Shutdown
ToTokenizer = (
    EngineLimits | TokenDeltas | Started | Refused | Flushed | Stats | Audited | Recover | LivenessProbe | Shutdown
)

__all__ = [
    "BOUNDLESS",
    "StopSpeculating",
    "GetAudit",
    "Difference",
    "AuditReport",
    "AuditReply",
    "AuditFigures",
    "Audited",
    "Audit",
    "Abort",
    "AbortReason",
    "ActorFacts",
    "ActorFailed",
    "ActorProgress",
    "ActorReady",
    "Admit",
    "Alive",
    "Cancel",
    "ChatPrompt",
    "CpuFacts",
    "CudaFacts",
    "Detokenize",
    "Detokenized",
    "Drained",
    "DropGrammar",
    "GrammarFailed",
    "GrammarReady",
    "PrepareGrammar",
    "EngineFacts",
    "EngineHealth",
    "EngineLimits",
    "EngineState",
    "ErrorCode",
    "Finish",
    "FinishKind",
    "Flush",
    "FlushCache",
    "FlushDone",
    "Flushed",
    "ForwardShape",
    "Generate",
    "GetStats",
    "Grammar",
    "GrammarKind",
    "MAX_BAD_WORDS",
    "MAX_BIASES",
    "MAX_GRAMMAR_BYTES",
    "LivenessProbe",
    "LogProbParams",
    "LogProbs",
    "MAX_LISTED_LOG_PROBS",
    "MAX_MARKER_TOKENS",
    "MAX_STOP_IDS",
    "MOST_RESTING",
    "NO_TOKEN",
    "MAX_STOP_STRINGS",
    "MAX_TOP_LOG_PROBS",
    "MAX_WORD_TOKENS",
    "MemorySaving",
    "Message",
    "Phase",
    "Ping",
    "Pong",
    "PrefillCosts",
    "Prompt",
    "READY",
    "Reasoning",
    "Recover",
    "Refused",
    "Rejected",
    "ResetSlot",
    "Resumed",
    "Roofline",
    "SamplingParams",
    "SchedulerFacts",
    "Shutdown",
    "SlotWork",
    "Started",
    "Stats",
    "StatsReply",
    "StepCosts",
    "StepPlan",
    "StepResult",
    "TextDeltas",
    "TextPrompt",
    "Thinking",
    "ToClient",
    "ToScheduler",
    "ToSupervisor",
    "ToTokenizer",
    "ToTokenizerFromClient",
    "ToWorker",
    "TokenDeltas",
    "TokenPrompt",
    "Tokenize",
    "Tokenized",
    "TokenizerFacts",
    "Usage",
    "WorkerFacts",
    "WorkerReady",
    "MetricsLevel",
    "Origin",
    "Speculative",
    "Verified",
]
