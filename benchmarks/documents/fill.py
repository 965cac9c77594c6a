"""Fills the marked places of the documents.

<!-- table: PATH [as VIEW] -->  a table of a result file (`result_tables.py`)             <!-- end -->
<!-- flags: NAME -->            a table of flags (`flags.py`)                              <!-- end -->
<!-- list: NAME -->             a table of clients or parameters (`lists.py`),
                                of attacks (`attacks.py`), real traffic, models, peers,
                                of files side by side (`side_by_side.py`),
                                of two GPUs (`two_gpus.py`), or of one
                                report of the record                     <!-- end -->
**42**<!-- figure: NAME -->     a figure inside a sentence (`figures.py`)

A figure's comment follows it, because a line that begins with a comment would end the paragraph.
"""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from documents import result_tables
from documents.age import documents
from documents.attacks import TABLES as ATTACKS, attacks_table
from documents.beside import NAME as PEERS, peers_table
from documents.figures import FIGURES, Results
from documents.flags import TABLES
from documents.lists import LISTS
from documents.models import NAME as MODELS, models_tables
from documents.real_traffic import NAME as REAL_TRAFFIC, real_traffic_table
from documents.side_by_side import TABLES as SIDE_BY_SIDE, side_by_side
from documents.step_chart import CHART, chart
from documents.two_gpus import ENGINES, NAME as TWO_GPUS, NAME_OF_SUMS, SUMS, two_gpus_tables

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
MARKED = {name: re.compile(rf"(<!-- {name}: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL) for name in ("flags", "list")}
FIGURE = re.compile(r"\*\*[^*\n]+\*\*(<!-- figure: (\S+) -->)")
BLOCKS = re.compile(r"<!-- (?:table|flags|list): .*?<!-- end -->", re.DOTALL)


def generated() -> dict[Path, str]:
    """Each generated file with the text that it should have."""
    files = {path: _from_its_folder(path, fill(path.read_text())) for path in documents(ROOT)}
    return files | {ROOT / CHART: chart(ROOT)}


def _from_its_folder(path: Path, text: str) -> str:
    """Tables link to results as pages in `docs/` do."""
    top = Path(*[".."] * len(path.parent.relative_to(ROOT).parts)).as_posix()
    return text.replace("](../benchmarks/", f"]({top}/benchmarks/")


def fill(text: str) -> str:
    """The text with every marked place made anew. Raises: KeyError for a name that is not known."""
    results = Results(ROOT)
    text = _filled(text, "flags", TABLES)
    committed = ROOT / RESULTS
    lists = LISTS | {
        **{name: functools.partial(attacks_table, committed / f"{summary}.json") for name, summary in ATTACKS.items()},
        REAL_TRAFFIC: lambda: real_traffic_table(committed),
        MODELS: lambda: models_tables(committed),
        PEERS: lambda: peers_table(ROOT),
        TWO_GPUS: lambda: two_gpus_tables(committed, (ENGINES,)),
        NAME_OF_SUMS: lambda: two_gpus_tables(committed, (SUMS,)),
        "default-by-batch": lambda: result_tables.record_table(committed, result_tables.DEFAULT_NUMBERS),
        "price-where-layers-recur": lambda: result_tables.record_table(committed, "price, deterministic_price_9b"),
        **{name: functools.partial(side_by_side, name, committed) for name in SIDE_BY_SIDE},
    }
    text = _filled(text, "list", lists)
    text = FIGURE.sub(lambda match: f"**{FIGURES[match[2]](results)}**{match[1]}", text)
    return result_tables.fill(text, ROOT)


def _filled(text: str, kind: str, tables_of: Mapping[str, Callable[[], str]]) -> str:
    """The text with the tables of one kind, by name."""
    return MARKED[kind].sub(lambda match: f"{match[1]}{tables_of[match[2]]()}\n{match[3]}", text)


def prose(text: str) -> str:
    """The text without what is generated."""
    return BLOCKS.sub("", text)
