"""The messages of each link: tagged, array-like, frozen msgspec structs, one union type per link.

A struct is named for where it goes. Times are seconds as float (monotonic clock of the machine), sizes are counts of
tokens unless the name tells otherwise. A new field goes last, with a default, so that old payloads still decode. Import
them from this package: each file holds the messages of one link, and an actor's inbox takes the union of its links.

    client ==Generate,Cancel,..==> frontend --Admit,Abort--> scheduler --StepPlan--> worker
    client <==TextDeltas,..======= frontend <--TokenDeltas-- scheduler <-StepResult- worker
"""

from overlap_spec.messages.audit import (
    BOUNDLESS as BOUNDLESS,
    AuditFigures as AuditFigures,
    AuditReply as AuditReply,
    AuditReport as AuditReport,
    Difference as Difference,
    GetAudit as GetAudit,
)
from overlap_spec.messages.base import (
    TOKEN_BYTES as TOKEN_BYTES,
    AbortReason as AbortReason,
    ErrorCode as ErrorCode,
    Finish as Finish,
    FinishKind as FinishKind,
    Message as Message,
    Phase as Phase,
    Phases as Phases,
    Usage as Usage,
)
from overlap_spec.messages.client import (
    CLIENTS_OF_A_FRONTEND as CLIENTS_OF_A_FRONTEND,
    Asked as Asked,
    AskedById as AskedById,
    Cancel as Cancel,
    Continued as Continued,
    Detokenize as Detokenize,
    Detokenized as Detokenized,
    DraftUpdated as DraftUpdated,
    Flush as Flush,
    FlushDone as FlushDone,
    Generate as Generate,
    GenerateShared as GenerateShared,
    GetStats as GetStats,
    LogProbs as LogProbs,
    Ping as Ping,
    Pong as Pong,
    Rejected as Rejected,
    Shared as Shared,
    StatsReply as StatsReply,
    TextDeltas as TextDeltas,
    ToClient as ToClient,
    ToFrontendFromClient as ToFrontendFromClient,
    Tokenize as Tokenize,
    Tokenized as Tokenized,
    UpdateDraft as UpdateDraft,
    is_another_frontend as is_another_frontend,
)
from overlap_spec.messages.extensions import (
    Extension as Extension,
    PackedRows as PackedRows,
    Rows as Rows,
    carrying as carrying,
    find as find,
)
from overlap_spec.messages.facts import (
    ActorFacts as ActorFacts,
    CpuFacts as CpuFacts,
    CudaFacts as CudaFacts,
    EngineFacts as EngineFacts,
    ForwardShape as ForwardShape,
    FrontendFacts as FrontendFacts,
    Guessing as Guessing,
    MemorySaving as MemorySaving,
    RankFacts as RankFacts,
    Roofline as Roofline,
    SchedulerFacts as SchedulerFacts,
    WorkerFacts as WorkerFacts,
)
from overlap_spec.messages.health import (
    READY as READY,
    AdaptFigures as AdaptFigures,
    DraftFigures as DraftFigures,
    DraftState as DraftState,
    EngineHealth as EngineHealth,
    EngineState as EngineState,
    Stats as Stats,
)
from overlap_spec.messages.request import (
    ANY_TERMS as ANY_TERMS,
    MAX_ALLOWED_IDS as MAX_ALLOWED_IDS,
    MAX_BAD_WORDS as MAX_BAD_WORDS,
    MAX_BIASES as MAX_BIASES,
    MAX_GRAMMAR_BYTES as MAX_GRAMMAR_BYTES,
    MAX_ID_CHARS as MAX_ID_CHARS,
    MAX_LISTED_LOG_PROBS as MAX_LISTED_LOG_PROBS,
    MAX_LOG_PROBS as MAX_LOG_PROBS,
    MAX_STOP_CHARS as MAX_STOP_CHARS,
    MAX_STOP_IDS as MAX_STOP_IDS,
    MAX_STOP_STRINGS as MAX_STOP_STRINGS,
    MAX_TEMPLATE_ARGUMENTS as MAX_TEMPLATE_ARGUMENTS,
    MAX_TEMPLATE_CHARS as MAX_TEMPLATE_CHARS,
    MAX_TOOLS as MAX_TOOLS,
    MAX_WIRE_ID_CHARS as MAX_WIRE_ID_CHARS,
    MAX_WORD_CHARS as MAX_WORD_CHARS,
    MAX_WORD_TOKENS as MAX_WORD_TOKENS,
    MOST_SECONDS as MOST_SECONDS,
    NO_METHOD as NO_METHOD,
    ChatPrompt as ChatPrompt,
    LogProbCount as LogProbCount,
    LogProbParams as LogProbParams,
    MetricsLevel as MetricsLevel,
    Origin as Origin,
    Prompt as Prompt,
    Speculative as Speculative,
    Terms as Terms,
    TextPrompt as TextPrompt,
    TokenPrompt as TokenPrompt,
    Verified as Verified,
    check_log_prob_count as check_log_prob_count,
    check_salt as check_salt,
    id_of_user as id_of_user,
    id_on_link as id_on_link,
    shown as shown,
)
from overlap_spec.messages.ring import (
    MOST_UNDRAFTED as MOST_UNDRAFTED,
    NEVER_S as NEVER_S,
    NO_TOKEN as NO_TOKEN,
    Abort as Abort,
    Admit as Admit,
    ChunkWork as ChunkWork,
    EngineLimits as EngineLimits,
    FlushCache as FlushCache,
    Flushed as Flushed,
    Memo as Memo,
    NewFrontend as NewFrontend,
    Owner as Owner,
    PrefillCosts as PrefillCosts,
    Refused as Refused,
    ResetSlot as ResetSlot,
    Resumed as Resumed,
    Started as Started,
    StepCosts as StepCosts,
    StepPlan as StepPlan,
    StepResult as StepResult,
    TokenDeltas as TokenDeltas,
    TwoPartSizes as TwoPartSizes,
    WorkerReady as WorkerReady,
    with_own_lists as with_own_lists,
    with_shared_lists as with_shared_lists,
)
from overlap_spec.messages.sampling import (
    DRAWS as DRAWS,
    JSON_WHITE_SPACE as JSON_WHITE_SPACE,
    LARGE_FIELDS as LARGE_FIELDS,
    Grammar as Grammar,
    GrammarKind as GrammarKind,
    Reasoning as Reasoning,
    SamplingParams as SamplingParams,
    Thinking as Thinking,
)
from overlap_spec.messages.step_rows import (
    AuditRoom as AuditRoom,
    GuessReport as GuessReport,
    LogProbRows as LogProbRows,
    Margins as Margins,
    Replayed as Replayed,
    TreePaths as TreePaths,
)
from overlap_spec.messages.supervisor import (
    ActorFailed as ActorFailed,
    ActorProgress as ActorProgress,
    ActorReady as ActorReady,
    Alive as Alive,
    Drained as Drained,
    LivenessProbe as LivenessProbe,
    Record as Record,
    Recover as Recover,
    Shutdown as Shutdown,
    ToSupervisor as ToSupervisor,
    Value as Value,
)

ToScheduler = (
    WorkerReady | StepResult | Admit | Abort | FlushCache | NewFrontend | Memo | Extension | LivenessProbe | Shutdown
)
ToWorker = StepPlan | Extension | FlushCache | LivenessProbe | Shutdown
ToFrontend = (
    EngineLimits
    | TokenDeltas
    | Started
    | Refused
    | Flushed
    | Memo
    | Stats
    | Extension
    | Recover
    | LivenessProbe
    | Shutdown
)

# What the links' decoders know, beside the messages. A message that carries a type that is not here is refused.
EXTENSIONS: tuple[type[Extension], ...] = (TreePaths, GuessReport, LogProbRows, Margins, Replayed, AuditRoom)
