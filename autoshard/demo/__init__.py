"""Two ordinary Flax train steps on real data: sharded, run on virtual devices, and held against the single-device run."""
