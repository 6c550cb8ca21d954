"""Pipelines: a step cut into stages that run on parts of the devices, microbatch by microbatch.

`schedule` has the orders of tasks and their memory, `simulation` their times; `scheduling` finds the orders of least step time: by
`list_scheduling` and the local search of `improving`, with the bound of `schedule_bound`. `drawing` draws them as text, and `waiting` says
what stages wait for.

A step becomes a pipeline in four parts. `micro` rewrites it into the program of one microbatch with what comes before and after; `cut`
decides the stage of each of its operations, and `around` those of what comes before and after; `stages` makes one program a stage;
`tasks` lowers it under its assignment and divides it into the tasks of a schedule; `run` runs them.

    staged = stages_of(traced, n_stages, n_microbatches)          # of autoshard.trace.Traced, the whole step
    staged.stages[0].traced                                       # an ordinary program: search it like any step
    staged.cut                                                    # stages_of(..., cut=staged.cut) makes the same stages again
    plans = [StagePlan(assignment, mesh, reshard_path), ...]      # one a stage: what its search found, on a JAX mesh of its devices
    run = Pipelined(staged, plans, schedule_of("1f1b", n_stages, n_microbatches))
    results = run(*flat_arguments)                                # flat results of the step; state stays on its stage's devices
    run.in_shardings, run.out_shardings, run.executed             # of flat arguments and results; the tasks of the last call in order

Of weights and state that are stacked along scanned layers each stage has the rows of its own layers (`layers`): its program has an argument
of these, and `run` takes them from the step's one array and puts the new ones together (`rows`).

With several chunks a stage, ``n_stages`` counts chunks: chunk ``c`` of stage ``s`` is ``staged.stages[schedule.piece(s, c)]``, and its
plan's mesh is that of stage ``s``.

Scanned layers can also be stages of one program, which is searched, judged and lowered like any other: `one_program` rewrites it.

`plan_search` searches numbers of stages and of microbatches together: `repeats` makes programs with a few of a step's own layers,
`layer_costs` has the costs of a layer from searches of these, and `layering` divides the layers into stages.
"""
