"""A compiled module's text as XLA:TPU writes it, small."""

_SCHEDULE = """HloModule module, is_scheduled=true

ENTRY %main (p: f32[1024]) -> f32[8192] {
  %p = f32[1024]{0} parameter(0)
  %start = (f32[1024]{0}, f32[1024]{0}) collective-permute-start(%p), source_target_pairs={PAIRS}
  %hides = f32[1024]{0} fusion(%p), kind=kLoop, calls=%body, backend_config={"estimated_cycles":"CYCLES"}
  %done = f32[1024]{0} collective-permute-done(%start)
  ROOT %gathered = f32[8192]{0} all-gather(%done), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}
"""


def schedule(cycles: int) -> str:
    """Eight devices pass 4 kB on, which so many cycles may hide, and gather 32 kB."""
    pairs = ",".join(f"{{{k},{(k + 1) % 8}}}" for k in range(8))
    return _SCHEDULE.replace("CYCLES", str(cycles)).replace("PAIRS", pairs)
