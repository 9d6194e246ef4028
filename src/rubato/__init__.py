"""Serve language models to stated service-level objectives."""

__version__ = "0.1.0"
