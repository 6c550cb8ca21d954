"""Exact and bounding inference in pairwise graphical models: numpy arrays only, nothing of programs or devices.

A model is a sum of unary and pair tables over discrete variables (`model`). `elimination` minimises it exactly where its induced width is
small, `trw_s` bounds its minimum from below by message passing, `reduced_cost_fixing` joins the two into an exact solver of large models,
and `dead_end_elimination` removes labels that no minimum needs.
"""
