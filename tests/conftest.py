"""Hypothesis profiles: `ci` for the suite, `full` (HYPOTHESIS_PROFILE=full) for the numbers that are reported."""

import os

from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=slow)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
