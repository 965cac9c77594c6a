"""Every attack. Those of `WORST` are also run on a GPU."""

from support.attacks.attacks_on_http import HTTP
from support.attacks.attacks_on_names import NAMES
from support.attacks.attacks_on_work import WORK
from support.attacks.case import Case
from support.attacks.findings import FINDINGS

CASES: list[Case] = [*FINDINGS.all, *HTTP.all, *WORK.all, *NAMES.all]
WORST: frozenset[str] = frozenset()
