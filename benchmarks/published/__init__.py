"""Do published training runs take as long as predicted? `python -m benchmarks.published`; see `benchmarks.published.__main__`."""
