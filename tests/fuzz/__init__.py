"""Random JAX programs as Python text, and the check that each is sharded without a change of numbers or an unplanned collective.

A `Program` is the body of a function, line by line, with the types of its arguments and the user's pins: it prints as a regression
test that can be pasted. `random_program` writes one, statement by statement: a *statement* function looks at the variables in scope and
writes a line or a block (the body of a loop, a branch, a differentiated function), whose results' types JAX itself infers.

Numbers stay well conditioned: floats are kept within a few units, nothing divides or takes logarithms of what may vanish, and what
rounding could tip (comparisons, positions, casts to integers) is only asked of *exact* variables: arguments, and what merely moves them.
"""

from fuzz.block import abstract_eval
from fuzz.checking import Mismatch, check
from fuzz.program import NAMES, P, Program, b1, f32, halved, i32
from fuzz.shrinking import shrunk
from fuzz.writing import random_program

__all__ = ["NAMES", "Mismatch", "P", "Program", "abstract_eval", "b1", "check", "f32", "halved", "i32", "random_program", "shrunk"]
