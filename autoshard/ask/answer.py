"""The questions that a plan answers: why it is so, what it looks like, and which lines make JAX arrive at it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.ask.pins import Pins
from autoshard.errors import StrategyError
from autoshard.explanation import explanation_of
from autoshard.explanation.explain import StrategyReport, explain
from autoshard.explanation.program import Searched
from autoshard.explanation.tensor_report import TensorReport, explain_tensor, explain_tensor_of_stages
from autoshard.ir.naming import is_backward
from autoshard.pipeline.figures import stage_kinds
from autoshard.plan.plan import Plan, named_as_strategies
from autoshard.plan.user_pins import Asked, user_pins
from autoshard.problem import Problem
from autoshard.progress import Progress, silent
from autoshard.report import HtmlReport, report, report_of
from autoshard.run.pipeline_step import passes_as
from autoshard.run.program import program_of
from autoshard.run.recorded import lasting
from autoshard.strategy import Record, save_record
from autoshard.trace import outside_mesh
from autoshard.trace.leaves import argument_names
from autoshard.verify.pins import fewest_pins


class Answer(Plan):
    """A plan that explains itself."""

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()

    def explain(self, tensor: str | None = None, details: bool = False, spec: PartitionSpec | None = None) -> StrategyReport | TensorReport:
        """A report that prints in a terminal and shows in a notebook; ``explain().data`` is the same as numbers and names.

        Args:
            tensor: the path of an argument or a result, a pattern, or the end of a path that no other has, such as ``"layers/*/up"``; or
                of a computed value the name that `jax.ad_checkpoint.checkpoint_name` gives it, its source line, as ``"model.py:41"``, its
                layer, or its operation, as ``"op 57"``. Then the report is why it is sharded so, what other layouts would cost, alone and
                with everything else chosen anew, and what makes others unavailable.
            details: whether to add pictures of the shards, the results, the proof of optimality, and what the searcher did; of a tensor
                of a large program, whether all its layouts are searched rather than a few.
            spec: a layout of which to say why the tensor does not have it.

        Raises:
            StrategyError: the strategy is from a file and has no program; or no tensor has the name, or several have.
        """
        if tensor is None:
            if spec is not None:
                raise StrategyError("spec= is a layout of one tensor, and none is named. Pass both: explain('up', spec=P('model')).")
            return explain(self.record, self._programs, details)
        if not isinstance(tensor, str):
            raise StrategyError(f"a tensor is given by its name, got {tensor!r}. Use a path that explain() prints, such as 'layers/*/up'.")
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise StrategyError(f"spec= is a PartitionSpec, got {spec!r}. Write P('model', None), for instance.")
        if self._traced is None:
            raise StrategyError(
                "other layouts of a tensor are searched in its program, which a strategy from a file lacks. Pass the function: "
                "strategy.with_program(fn, *args).explain(tensor); on the command line autoshard explain FILE MODULE:FUNCTION --args "
                "MODULE:NAME --tensor NAME."
            )
        asked = None if spec is None else tuple(spec)
        if self.record.pipeline is not None:
            several, judged = len(self.passes) > 1, iter(self._programs)
            named = {
                f"stage {k}" + f" of pass {number}" * several: (next(judged), stage._in_question())
                for number, own in enumerate(self.passes, 1)
                for k, stage in enumerate(own)
            }
            return explain_tensor_of_stages(named, tensor, asked, details)
        assert self._judged is not None, "a strategy with its program"
        return explain_tensor(self._judged, tensor, self._in_question(), asked, details)

    def _in_question(self) -> Searched:
        """What the search knows, with its problem; of a sharding that was given, or from a file, that is made for the first question."""
        known, record = self._searched, self.record
        if known.problem is None or known.problem.mesh != record.mesh:
            graph, judged = known.facts.graph, self._judged
            assert judged is not None, "a strategy with its program"
            pins = self._pins or user_pins(Asked(), graph, [()] * len(graph.arguments), False)
            limit = record.limit_bytes
            self._known = known = replace(known, problem=Problem(known.facts, judged.model, pins.on(record.mesh), limit))
        return known

    def report(self) -> HtmlReport:
        """The strategy as a page with timeline, memory, mesh, tables and graph, which a notebook shows.

        ``report().save_html(path)`` writes it as one file that opens offline, ``report().save_trace(path)`` the timeline for
        ui.perfetto.dev. Of a strategy from a file the page is the one that the file keeps.

        >>> import jax.numpy as jnp
        >>> import autoshard
        >>> strategy = autoshard.search(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((8, 4)), cluster="cpu:8")
        >>> strategy.report().html[:15]
        '<!DOCTYPE html>'
        """
        if self._traced is None:
            return report_of(self.record)
        pipeline, kinds = self.record.pipeline, list[Mapping[int, str]]([{}])
        if pipeline is not None:
            kinds = [stage_kinds(stage) for _, staged, _ in passes_as(self._traced, self.record, pipeline) for stage in staged.stages]
        return report(self.record, explanation_of(self.record, self._programs), list(zip(self._programs, kinds, strict=True)))

    @outside_mesh(keep_auto=True)
    def pins(self, fn: Callable[..., Any], *args: Any, budget_seconds: float = 30.0, progress: Progress = silent) -> Pins:
        """The fewest argument specs and ``with_sharding_constraint`` lines that make JAX's own propagation arrive at this strategy.

        The answer prints as Python to paste, each line with the source line where it belongs, and says whether a program with only
        these lines was seen to have the strategy's collectives.

        Args:
            fn, args: the program that the strategy is for.
            budget_seconds: how long to look for lines that can go; what is left by then is verified all the same.
            progress: called with what is being done and the fraction that is done.

        Raises:
            StrategyError: ``fn`` is not the program the strategy is for.
        """
        rewrites, piped = self.record.program.rewrites, self.record.pipeline is not None
        if rewrites or piped:
            what = [*(["a pipeline of stages"] if piped else []), *(each.describe() for each in rewrites)]
            without = [*(["stages=None"] if piped else []), *(each.without for each in rewrites)]
            raise StrategyError(
                f"pins shard a program as it is, and this strategy has it rewritten: {'; '.join(what)}. Search with {', '.join(without)}."
            )
        traced, rules, path = program_of(fn, args, self.record, before=self._traced)
        graph = traced.graph
        found = fewest_pins(traced.jaxpr, graph, rules, self.record.assignment, path, budget_seconds, progress)
        return Pins(
            record=self.record,
            found=found,
            differentiated=any(map(is_backward, graph.walk())),
            argument_names=argument_names(fn, len(args)),
            has_modules=traced.modules is not None,
        )

    @property
    def kept(self) -> Record:
        """The record as a file keeps it: with what `explain` and `report` show of the program, where that is at hand."""
        return self.record if self._traced is None else replace(self.record, report=self.report().packed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the strategy as canonical JSON, whole or not at all; equal strategies are equal files, so what took how long stays out."""
        save_record(lasting(self.kept), path)


named_as_strategies(Answer)
