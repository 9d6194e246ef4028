"""`rubato.types`, as it was called until 0.3."""

import warnings

from rubato.core.types import *  # noqa: F403

warnings.warn("rubato.types is now rubato.core.types; the old name goes with the next release", FutureWarning, 2)
