"""Searching under a memory limit: prices of bytes (`lagrangian`), their lower bound (`dual_bound`), and changes between them (`repair`)."""
