"""Loading the user's program: ``module:function``, and the arguments named beside it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from autoshard.errors import AutoshardError


class ProgramError(AutoshardError):
    """A program or its arguments cannot be loaded under the name that was given."""


def load(program: str, args: str | None, devices: int | None = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments. What the modules print while they load goes to stderr, since stdout is for our output.

    Args:
        program: ``module:function``.
        args: ``module:name`` of a tuple or of a function that returns it; None for a program without arguments.
        devices: how many virtual CPU devices JAX is to have when the modules are imported; None leaves it alone.

    Raises:
        ProgramError: a name is malformed or not found, the function cannot be called, or the arguments do not fit it.
    """
    function = _function(program, devices)
    with contextlib.redirect_stdout(sys.stderr):
        arguments = () if args is None else _arguments(args)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return function, arguments
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = f"{args} gives {len(arguments)}" if args else "none are given"
        raise ProgramError(
            f"the arguments must fit the program: {program} takes {signature} and {given} ({error}). "
            "Name a function that returns the tuple of its arguments with --args MODULE:NAME."
        ) from None
    return function, arguments


def load_maker(program: str, args: str | None, devices: int | None = None) -> tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]:
    """The function, and the function of a batch size that makes its arguments.

    Raises:
        ProgramError: a name is malformed or not found, or is no function.
    """
    function = _function(program, devices)
    if args is None:
        raise ProgramError("with --batch the arguments are a function of the batch size. Name it with --args MODULE:NAME.")
    with contextlib.redirect_stdout(sys.stderr):
        maker = _named(args, "--args")
    try:
        inspect.signature(maker).bind(1)
    except TypeError:
        raise ProgramError(
            f"with --batch --args names a function of the batch size that returns the tuple of arguments, and {args} is none. "
            "Write def example_args(batch): ... ."
        ) from None
    return function, maker


def _function(program: str, devices: int | None) -> Callable:
    """The program's function, imported from the current folder or the installed packages."""
    if devices is not None:
        from autoshard.demo.devices import virtual_devices

        virtual_devices(devices)
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    with contextlib.redirect_stdout(sys.stderr):
        function = _named(program, "a program")
    if not callable(function):
        raise ProgramError(f"a program is a function, and {program} is of type {type(function).__name__}. Name a function in that module.")
    return function


def _arguments(name: str) -> tuple:
    found = _named(name, "--args")
    if callable(found) and not _without_arguments(found):
        raise ProgramError(f"--args names a function without arguments that returns the program's, and {name} takes some. Name another.")
    made = found() if callable(found) else found
    if not isinstance(made, tuple):
        raise ProgramError(
            f"--args gives a tuple with one entry an argument, and {name} gives a {type(made).__name__}. "
            "Return a tuple; of one argument, (x,)."
        )
    return made


def _without_arguments(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # some built-in callables have no signature
        pass
    return True


def _named(name: str, what: str) -> Any:
    """The object called ``module:attribute``."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ProgramError(f"{what} reads module:function, got {name!r}.")
    found = _module(module_name, name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            own = vars(found).items() if hasattr(found, "__dict__") else ()
            fits = (key for key, value in own if callable(value) or (what == "--args" and isinstance(value, tuple)))
            offered = sorted(key for key in fits if not key.startswith("_"))
            near = get_close_matches(attribute, offered, n=1)
            meant = f" Did you mean {module_name}:{near[0]}?" if near else ""
            raise ProgramError(
                f"{what} names {name!r}, and module {module_name!r} has no {attribute!r}.{meant} "
                f"It has: {', '.join(offered[:20]) or 'no functions'}."
            ) from None
    return found


def _module(module_name: str, name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        hint = f" Write {module_name.removesuffix('.py')}:... without .py." if module_name.endswith(".py") else ""
        raise ProgramError(
            f"there is no module {error.name!r}, which {name!r} names, in {os.getcwd()} or among the installed packages.{hint} "
            "Run from the folder that holds it, or install it."
        ) from None
    except SystemExit:
        raise ProgramError(
            f"module {module_name!r} ends the process while it is imported. Put what it runs under: if __name__ == '__main__'."
        ) from None
