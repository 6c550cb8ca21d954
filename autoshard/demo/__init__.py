"""Demo of two Flax train steps on real data: sharded, run on virtual devices, and compared with the single-device run."""
