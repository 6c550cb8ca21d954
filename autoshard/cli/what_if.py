"""``autoshard what-if``: the difference that other devices, meshes, pins or batches would make."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from autoshard.cli.asked import add_asked, asked
from autoshard.cli.explain import strategy_of
from autoshard.cli.found import record_of
from autoshard.cli.options import add_optional_function, add_specs, check_request, cluster_of, command, positive
from autoshard.cli.terminal import show, show_json, working

EXAMPLE = "autoshard what-if found.json train:train_step --args train:example_args --cluster v5e:4x8"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "say what other devices, another mesh, pins, batch, microbatches or stages would change"
    parser = command(commands, "what-if", run, what, EXAMPLE)
    parser.add_argument("strategy", metavar="FILE", help="a file that --save wrote, or a name that autoshard strategies lists")
    told = "its program, which is searched again; without it --batch, and --cluster of the same devices, are estimated from the file"
    add_optional_function(parser, told)
    parser.add_argument("--cluster", metavar="CLUSTER", help="other devices, such as v5e:4x8; their mesh is then searched")
    add_asked(parser, "mesh", "microbatches", "memory_limit_bytes", "stages", "schedule")
    parser.add_argument("--chunks", metavar="N", type=positive, help="of a pipeline: stages on each part of the devices")
    parser.add_argument("--batch", metavar="N", type=positive, help="examples of the whole batch")
    add_specs(parser, "--pin", "fix a sharding; repeatable")
    parser.set_defaults(pins_from=None)
    parser.add_argument("--save", metavar="FILE", help="write the other strategy to a JSON file")


def run(options: argparse.Namespace) -> int:
    """Searches again, or estimates, and compares."""
    if options.program is None:
        return _estimated(options)
    check_request(options)
    with working():
        found = strategy_of(options).what_if(
            batch=options.batch,
            chunks=options.chunks,
            **asked(options, without=("batch",)),
        )
    if options.save:
        found.strategy.save(options.save)
        print(f"saved to {options.save}", file=sys.stderr)
    show_json(found.to_dict()) if options.json else show(found)
    return 0


def _estimated(options: argparse.Namespace) -> int:
    """The same plan at another size, by its file alone."""
    from autoshard.errors import StrategyError
    from autoshard.explanation.comparison import comparison
    from autoshard.explanation.sized import NAME_IT, NOTE, sized

    given = [name for name in ("mesh", "microbatches", "memory_limit_bytes", "pin", "save") if getattr(options, name, None)]
    if given or (options.cluster is None and options.batch is None):
        what = f"--{given[0].replace('_bytes', '').replace('_', '-')} needs a search" if given else "neither is given"
        raise StrategyError(f"from a file alone another size is estimated, by --batch and --cluster; {what}. {NAME_IT}")
    record = record_of(options.strategy)
    after = sized(record, None if options.cluster is None else cluster_of(options.cluster), options.batch)
    found = comparison(record, after, ("now", "what if"))
    if options.json:
        show_json(found.to_dict())
    else:
        show(found)
        print(f"\n{NOTE[0].upper()}{NOTE[1:]}.")
    return 0
