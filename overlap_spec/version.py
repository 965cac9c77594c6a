"""The version of this package. Not here: anything to import."""

__version__ = "0.1.0"
