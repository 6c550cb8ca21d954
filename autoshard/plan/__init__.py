"""The search of a request: variants of a program, their meshes and assignments, confirmation; and the plan that comes of it."""
