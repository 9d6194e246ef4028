"""Serve language models to stated service-level objectives."""
