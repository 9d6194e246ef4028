"""Parallel resumable jobs, run specifications, sweeps, capacity search, fleet size."""
