"""The search over meshes: candidates and their placements, lower bounds that cut some of them, refinement, and early ends."""
