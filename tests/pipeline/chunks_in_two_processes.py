"""One of two processes with four devices each: ``python chunks_in_two_processes.py PORT SCHEDULE NUMBER``; see test_sending.py."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

import autoshard
from autoshard.ir import Mesh
from autoshard.pipeline.run import Pipelined
from autoshard.pipeline.scheduling import schedule_of
from autoshard.pipeline.stages import stages_of
from autoshard.trace import trace
from tests import programs
from tests.pipeline import published_schedules as published
from tests.pipelines import plans_of

name, number = sys.argv[2], int(sys.argv[3])
autoshard.distributed.initialize(f"localhost:{sys.argv[1]}", 2, number)
SCHEDULES = {"interleaved": lambda *n: schedule_of("interleaved", *n, 2), "zb_v": published.zb_v, "dual_pipe_v": published.dual_pipe_v}


def compared(function, args, n_stages, n_microbatches, steps=2):
    """A pipeline's losses and state are those of one device; each process starts the tasks of its own stages alone."""
    schedule, mesh = SCHEDULES[name](n_stages, n_microbatches), Mesh.of({"data": 8 // n_stages})
    traced = trace(function, *args, donate_argnums=0)
    staged = stages_of(traced, schedule.n_pieces, n_microbatches)
    run = Pipelined(staged, plans_of(staged, n_stages, mesh, "data_parallel", schedule.placement), schedule)
    one, replaced = jax.jit(jaxpr_as_fun(traced.jaxpr)), dict(traced.graph.aliases)
    theirs = [np.asarray(x) for x in jax.tree.leaves(programs.concrete(args))]
    made = jax.make_array_from_callback
    ours = [made(x.shape, there, x.__getitem__, dtype=x.dtype) for x, there in zip(theirs, run.in_shardings, strict=True)]
    for _ in range(steps):
        expected, results = [np.asarray(x) for x in one(*theirs)], run(*ours)
        for k, path in enumerate(traced.graph.result_paths):
            for shard in results[k].addressable_shards:
                np.testing.assert_allclose(shard.data, expected[k][shard.index], rtol=1e-4, atol=3e-5, err_msg=path)
        for k, argument in replaced.items():
            theirs[argument], ours[argument] = expected[k], results[k]
    own = range(number * n_stages // 2, (number + 1) * n_stages // 2)
    assert {stage for stage, _ in run.executed} == {*own} and len(run.executed) == len(run.order) // 2
    print(schedule.name, "as on one device", flush=True)


SIZES = {"d_model": 16, "heads": 2, "ffn": 32, "batch": 16}
compared(*programs.gpt(n_layers=8, **SIZES), 4, 8)
compared(*programs.gpt_scan(n_layers=4, **SIZES), 2, 4)  # rows of layers are sent to their chunks
print("done")
