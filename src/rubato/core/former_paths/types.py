"""`rubato.types`, as it was called until 0.3."""

import warnings

from rubato.core.events import *  # noqa: F403
from rubato.core.plan import *  # noqa: F403
from rubato.core.request import *  # noqa: F403

warnings.warn(
    "rubato.types is now rubato.core.request, plan and events; the old name goes with the next release",
    FutureWarning,
    2,
)
