"""Memory read from XLA's buffer assignment."""

from autoshard.verify import read_buffers

# Recorded from XLA:TPU (libtpu 0.0.42) and shortened: a carried value that lies in one place under three names, on-chip memory, a constant.
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce_sum.14 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 1000, parameter 31, shape |bf16[500]| at ShapeIndex {}, maybe-live-out:
 value: <2798 param.3 @0> (size=1000,offset=0): bf16[500]{0:T(8,128)(2,1)}
allocation 2: size 24, constant:
 value: <9 constant.4 @0> (size=24,offset=0): f32[6]{0:T(128)}
allocation 3: size 900, preallocated-temp:
 value: <10 broadcast.87 @0> (size=300,offset=0): bf16[150]{0}
 value: <2893 while.127{5} (phi) @0> (size=300,offset=0): bf16[150]{0}
 value: <12 fusion.1{2} @0> (size=300,offset=0): bf16[150]{0}
 value: <13 copy.2 @0> (size=200,offset=300): bf16[100]{0}
 value: <14 copy.3 @0> (size=200,offset=700): bf16[100]{0}
allocation 4: size 4096, color 1, preallocated-temp:
 value: <15 copy.4 @1> (size=4096,offset=0): bf16[2048]{0:T(8,128)(2,1)S(1)}

Total bytes used: 6532 (6.38KiB)

Used values:
"""
LIVE = """\
HloLiveRange (max 30):
  InstructionSequence:
    0:constant.4
    1:param.3
  BufferLiveRange:
    param.3{}:0-30
    broadcast.87{}:2-5
    while.127{5}:5-20
    fusion.1{2}:15-16
    copy.2{}:6-9
    copy.3{}:10-14
    copy.4{}:0-30
  Live ranges at 12 (peak):
    while.127{5}: 300 bytes (cumulative: 300 bytes)
"""


def test_peak_counts_what_lives_at_once_and_shared_bytes_once():
    """Arguments and constants always, of the temporaries the fullest step's bytes; the allocator's size includes holes."""
    found = read_buffers(ASSIGNMENT, LIVE)
    assert found.peak_bytes == 1024 + 300 + 200
    assert found.allocated_bytes == 1024 + 900


def test_values_that_end_before_others_begin_do_not_add_up():
    """A step later would overlap, and does count."""
    longer = LIVE.replace("copy.2{}:6-9", "copy.2{}:6-10")
    assert read_buffers(ASSIGNMENT, longer).peak_bytes == 1024 + 300 + 400
