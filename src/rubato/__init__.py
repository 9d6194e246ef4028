"""Rubato: serve language models to stated service-level objectives."""
