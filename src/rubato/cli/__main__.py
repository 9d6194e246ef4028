"""`python -m rubato.cli`: the command without its script."""

from __future__ import annotations

import sys

from rubato.cli.main import main

sys.exit(main())
