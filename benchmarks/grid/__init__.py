"""The grid of `never_slower.py`: cases with their cells, one call of some requests, and the report with its table."""
