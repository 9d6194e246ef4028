"""The configuration of a server or a simulation: its YAML, and what is built from it."""
