"""Load generation, request records, confidence intervals, comparisons, plots, engine profiling."""
