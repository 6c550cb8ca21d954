"""Verification against compilers: ahead-of-time compilation, collectives, FLOPs and memory of compiled modules, Shardy's propagation."""

from autoshard.verify.aot import COMPILERS, Ahead, AheadCompiler, Compilation, Options, compile_ahead, refused_bytes
from autoshard.verify.attribution import NO_OP, Clock, CompiledKernel, bytes_by_op, compiled_kernels, seconds_by_op
from autoshard.verify.buffers import Buffers, read_buffers
from autoshard.verify.compare import Row, compare
from autoshard.verify.flops import Flops, dot_flops
from autoshard.verify.hlo import collectives_of
from autoshard.verify.schedule import corrected_seconds, scheduled_seconds, sent_seconds
from autoshard.verify.shardy_layouts import propagated
from autoshard.verify.shardy_passes import explicit_collectives
from autoshard.verify.slices import in_phases
from autoshard.verify.targets import TARGETS, Target, devices_here, peak_bytes_of, several_devices
from autoshard.verify.topology import Topology, compiled_topology, host_topology, topology_of
