"""Reductions: smaller problems whose solutions are solutions of the given one.

The ``apply`` of each module returns a reduction, whose ``invert`` maps labels of the reduced problem back:

- `symmetry`: one variable for each class of equivalent variables, such as the same operation in equal layers.
- `low_degree`: variables of one or two neighbours eliminated.
- `axis_split`: mesh axes split into prime factors, and merged back.
"""
