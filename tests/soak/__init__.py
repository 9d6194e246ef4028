"""A server under load and faults, and what must hold meanwhile: `python -m tests.soak --help`."""
