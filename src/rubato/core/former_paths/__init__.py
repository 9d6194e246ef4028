"""Modules that users' policies import by the paths of version 0.3: `rubato.types` and two more, for one release."""
