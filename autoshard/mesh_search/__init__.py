"""The search over meshes: candidate meshes and placements, bounds that cut hopeless ones, refinement, and answers of early ends."""
