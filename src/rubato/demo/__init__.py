"""`rubato demo`: this machine measured, then three tiers of requests under several policies."""
