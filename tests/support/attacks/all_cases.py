"""Every attack. Those of `WORST` are also run on a GPU."""

from support.attacks.attacks_on_http import HTTP
from support.attacks.attacks_on_names import NAMES
from support.attacks.attacks_on_work import WORK
from support.attacks.case import Case
from support.attacks.findings import FINDINGS

CASES: list[Case] = [*FINDINGS.all, *HTTP.all, *WORK.all, *NAMES.all]
WORST = frozenset(
    {
        "body-for-a-quadratic-expression",
        "chunks-of-one-byte-without-a-key",
        "conversation-of-30-mib-over-zmq",
        "eighty-long-texts",
        "log-probs-of-a-long-prompt",
        "long-stop-string-of-many-prompts",
        "native-log-probs-of-a-long-prompt",
        "schemas-that-do-not-compile",
        "slow-stop-regexes-of-forty-choices",
        "unfinished-and-endless-messages",
    }
)
