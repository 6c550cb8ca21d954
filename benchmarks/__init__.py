"""Benchmarks: each module answers one question, named in its docstring. Run one with ``python -m benchmarks.NAME``."""
