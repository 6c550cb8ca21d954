"""Reductions: smaller problems whose solutions are solutions of the given one.

Each module has ``apply``, which returns the reduced problem, and what it returns has ``invert``, which maps its labels back:

- `symmetry`: one variable for all that look alike, such as the same operation in equal layers.
- `low_degree`: variables of one or two neighbours eliminated.
- `axis_split`: mesh axes split into prime factors, and merged back.
"""
