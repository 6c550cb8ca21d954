"""One process of `autoshard launch`: runs a script as Python does, and leaves at once where that fails or the launcher is gone.

It is run by its path and imports nothing of autoshard, so that the script may still set the environment that JAX reads when imported.
"""

import contextlib
import os
import runpy
import signal
import sys
import threading
import types


def main(launcher: str, notices: str, kind: str, name: str, *arguments: str) -> None:
    """Runs the script, or the module, in place of this one.

    A failure leaves without what Python does at exit: there `jax.distributed.shutdown` waits five minutes for processes that wait for
    this one (JAX 0.10.2).

    Args:
        launcher: a pipe's descriptor, which the launcher never writes to and has open as long as it runs.
        notices: a pipe's descriptor, to which the process writes its index once the script has run to its end.
        kind, name, arguments: ``"script"`` with its path or ``"module"`` with its name, and what it is given.
    """
    threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    is_script = kind == "script"
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:  # else Python has put no folder in front
        sys.path[0] = os.path.dirname(os.path.realpath(name)) if is_script else os.getcwd()
    try:
        runpy.run_path(name, run_name="__main__") if is_script else runpy.run_module(name, run_name="__main__", alter_sys=True)
        return _notify(int(notices))
    except SystemExit as stop:
        code = stop.code
        if code is None or code == 0:
            return _notify(int(notices))
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(_of_script(error.__traceback__)), error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _notify(notices: int) -> None:
    """Tells the launcher that only what Python does at exit is left, where JAX waits for all processes."""
    with contextlib.suppress(OSError, KeyError):
        os.write(notices, f"{os.environ['JAX_PROCESS_ID']}\n".encode())


def _end_with(launcher: int) -> None:
    """Ends this process and those that it has started, its group, once the launcher has ended in whatever way."""
    os.read(launcher, 1)
    os.killpg(0, signal.SIGKILL)


def _of_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames above the script's own."""
    above = (__file__, runpy.run_path.__code__.co_filename)
    while trace is not None and trace.tb_frame.f_code.co_filename in above:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(*sys.argv[1:])
