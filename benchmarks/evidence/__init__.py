"""Do compilers still do what `autoshard.compilers` says of them? Small programs, and the figures of them that show each fact.

A row of ``autoshard/compilers/evidence/*.json`` has the observation, the constant or function that it supports, and the figure of each
program; ``python -m benchmarks.evidence NAME`` compiles them ahead of time, without devices.
"""
