"""The command `rubato`: words in, text out. A verb a module: `add` says what can be said, the rest does it."""
