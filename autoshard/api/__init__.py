"""What users call: search, evaluate, parallelize, and the `Strategy` they get."""
