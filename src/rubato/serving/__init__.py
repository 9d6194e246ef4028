"""The OpenAI-compatible HTTP edge: schemas, SLO input, streaming, errors and metrics over a `Cluster`."""
