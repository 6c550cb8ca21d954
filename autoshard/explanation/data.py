"""The explanation of a strategy as data: what was split how, what a step costs and where, and what could be changed.

An `Explanation` is a tree of frozen dataclasses with numbers, names and specs: text, HTML, JSON and the report are renderings of it.
Seconds are of one step, bytes of one device. Its shape:

- ``sentences``: three, as a person would say them.
- ``time``: a `StepTime`; ``layers`` and ``lines``: the same seconds by layer and by source line, each a `Place`, the longest first.
- ``memory``: `MemoryGroup`s of the fullest moment, the largest first, up to ``peak_bytes``.
- ``mesh``: an `Axis` for each mesh axis.
- ``arguments``, ``activations``: `TensorGroup`s; equal tensors whose paths differ by indices are one group.
- ``collectives``: `CollectiveGroup`s, the longest first; ``repeated``: the `RepeatedWork` of mesh axes.

A strategy that was loaded from a file, without its program, has collectives by layer and line but no compute, no activations, no memory by
group and no repeated work: ``has_program`` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir import Spec
from autoshard.ir.naming import itemsize
from autoshard.ir.pieces import piece_of


@dataclass(frozen=True, slots=True)
class StepTime:
    """The predicted seconds of a step.

    Attributes:
        step_seconds: from its start to its end.
        compute_seconds: of all kernels.
        exposed_seconds: of collectives while nothing is computed.
        hidden_seconds: of collectives beside compute.
        waiting_seconds: neither: the rest of the step, in a pipeline while other stages compute.
        matrix_share: the share of the matrix unit's peak that the step reaches, in [0, 1].
        interval_seconds: between which eight in ten steps on such devices are expected; None where none is published.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    waiting_seconds: float
    matrix_share: float
    interval_seconds: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A layer or a source line, and what a step spends there.

    Attributes:
        name: a layer, or ``file:line (function)``.
        compute_seconds: of its kernels, forward and backward.
        communication_seconds, exposed_seconds: of its collectives, and the part that no compute hides.
        product_seconds: the part of compute that is matrix products and convolutions.
        flops: of these.
        n_ops: how many operations it has, loop trips not counted.
    """

    name: str
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    product_seconds: float
    flops: float
    n_ops: int

    @property
    def seconds(self) -> float:
        """What it adds to the step: compute, and collectives that nothing hides."""
        return self.compute_seconds + self.exposed_seconds


@dataclass(frozen=True, slots=True)
class Stages:
    """How the stages of a pipeline share a step; stages on the same devices count as one.

    Attributes:
        schedule, microbatches: the order of tasks, and in how many parts the batch is computed.
        busy_seconds: per part of the devices the time in which they compute or wait for their own collectives.
        chunks: how many stages each part of the devices has.
        step_seconds: of the whole step.
        placement: of the stages on the parts of the devices.
    """

    schedule: str
    microbatches: int
    chunks: int
    busy_seconds: tuple[float, ...]
    step_seconds: float
    placement: str = "loop"

    @property
    def busiest(self) -> int:
        """The number of the part with most to do, for which an explanation has the time by layer, line and collective."""
        return self.busy_seconds.index(max(self.busy_seconds))

    @property
    def busiest_words(self) -> str:
        """``stage 1``; ``the devices of stages 1 and 3`` where they have several."""
        names = [str(piece_of(self.busiest, chunk, len(self.busy_seconds), self.placement)) for chunk in range(self.chunks)]
        return f"stage {names[0]}" if len(names) == 1 else f"the devices of stages {', '.join(names[:-1])} and {names[-1]}"

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """Per part of the devices the share of the step in which they wait for other stages."""
        return tuple(max(1 - seconds / (self.step_seconds or 1.0), 0.0) for seconds in self.busy_seconds)


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Bytes of a device at the fullest moment of the step.

    Attributes:
        kind: state, inputs, activations, gradients, temporaries, copies, partial sums or other; copies are of values that were
            gathered or resharded.
        name: the pattern of the arguments' paths, or the layer whose values these are.
        bytes: of all of them.
        n: how many arrays.
    """

    kind: str
    name: str
    bytes: float
    n: int


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis.

    Attributes:
        name, size: of the axis, and the number of devices along it.
        place: where it runs on the cluster, in words; empty where no placement was decided.
        splits_inputs: whether it splits an argument that is no state, such as the batch.
        state_share: the share of the state's bytes that it splits.
        gathered_share: the share of the state that it splits that is gathered over it before it is used, moments with their parameters.
        communication_seconds, exposed_seconds: of the collectives along it, those along several axes counted for each.
        divides_program: whether it is that of a pipeline's stages.
        activation_share: the share of the bytes of what the forward pass stores that it splits; 0.0 without the program.
    """

    name: str
    size: int
    place: str
    splits_inputs: bool
    state_share: float
    gathered_share: float
    communication_seconds: float
    exposed_seconds: float
    divides_program: bool = False
    activation_share: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of equal shape, dtype and spec whose paths differ by indices, or of which some mirror others, as an optimizer's moments do.

    Attributes:
        name: the pattern of their paths, ``state['params']['layers'][*]['up']``, or the layer and line that make an activation.
        n: how many are named so; ``alike`` more mirror them.
        alike: see there.
        shape, dtype, spec: of each, whole.
        bytes: on a device, of all of them.
        paths: of those that are arguments.
    """

    name: str
    n: int
    alike: int
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes: float
    paths: tuple[str, ...] = ()

    @property
    def whole_bytes(self) -> float:
        """The bytes of all of them, unsharded."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size * itemsize(self.dtype) * (self.n + self.alike)


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """Collectives of one kind, size and reason, which differ by a layer's index at most.

    Attributes:
        kind, axes: the HLO name in snake case, and the mesh axes along which it runs.
        bytes: the larger of operand and result on one device, in one execution.
        count: executions in one step.
        seconds, exposed_seconds: of all executions.
        tensor, source, cause: what is moved, the operation and source line it serves, and why, in words.
        layer: the layer of that operation.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    count: int
    seconds: float
    exposed_seconds: float
    tensor: str
    source: str
    cause: str
    layer: str


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Compute that every device of an axis repeats, since the axis does not split it.

    Attributes:
        axis, size: the mesh axis.
        seconds: of such compute in a step.
        uneven_seconds: the part of it of operations that have no dimension which the axis divides; it could split the others, at the price
            of collectives.
        saved_seconds: what the step would save at most if the axis split all of it.
        layers: where most of it is, each with its seconds.
    """

    axis: str
    size: int
    seconds: float
    uneven_seconds: float
    saved_seconds: float
    layers: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A strategy explained; see the module's docstring for the parts.

    Attributes:
        title: one line.
        program, cluster, mesh_words: the function's name, the cluster's, and the mesh as ``data=2 x model=8``.
        n_devices: of the mesh.
        peak_bytes, limit_bytes: predicted peak memory of a device, and what a program may have.
        sent_bytes, compiled_bytes: that collectives send in a step, as planned, and as the cluster's compiler is expected to send them.
        notes: what was assumed, and requests that could not be met.
        has_program: whether the program was at hand.
        stages: of a pipeline; None of other strategies. Time and collectives are then those of the busiest stage.
    """

    title: str
    program: str
    cluster: str
    mesh_words: str
    n_devices: int
    sentences: tuple[str, ...]
    time: StepTime
    peak_bytes: float
    limit_bytes: float
    memory: tuple[MemoryGroup, ...]
    mesh: tuple[Axis, ...]
    arguments: tuple[TensorGroup, ...]
    activations: tuple[TensorGroup, ...]
    layers: tuple[Place, ...]
    lines: tuple[Place, ...]
    collectives: tuple[CollectiveGroup, ...]
    sent_bytes: float
    compiled_bytes: float
    repeated: tuple[RepeatedWork, ...]
    notes: tuple[str, ...]
    has_program: bool
    stages: Stages | None = None
