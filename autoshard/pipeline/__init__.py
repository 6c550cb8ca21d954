"""Pipelines: a step cut into stages that run on parts of the devices, microbatch by microbatch.

`schedule` has the orders of tasks (GPipe, 1F1B, interleaved, zero-bubble), their memory, and simulation; `drawing` draws them as text.
"""
