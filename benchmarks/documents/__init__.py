"""Generates parts of the documents: tables of results and flags, figures inside sentences, the chart of step times.

`python benchmarks/write_docs.py` writes them; `tests/unit/test_documents.py` checks that they are current.
"""
