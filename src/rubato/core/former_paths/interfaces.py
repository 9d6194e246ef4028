"""`rubato.interfaces`, as it was called until 0.3."""

import warnings

from rubato.core.interfaces import *  # noqa: F403
from rubato.core.interfaces import nothing_sent

untold = nothing_sent

warnings.warn(
    "rubato.interfaces is now rubato.core.interfaces; the old name goes with the next release", FutureWarning, 2
)
