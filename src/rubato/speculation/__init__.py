"""Speculative decoding: what a drafter proposes, and what of it turns out right (`acceptance`, for simulation)."""
