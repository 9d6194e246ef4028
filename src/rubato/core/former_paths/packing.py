"""`rubato.packing`, as it was called until 0.3."""

import warnings

from rubato.core.batch_builder import *  # noqa: F403
from rubato.core.batch_builder import BatchBuilder

Packing = BatchBuilder

warnings.warn(
    "rubato.packing is now rubato.core.batch_builder; the old name goes with the next release", FutureWarning, 2
)
