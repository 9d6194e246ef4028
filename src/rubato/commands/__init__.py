"""What subcommands of `rubato` do, a module each: `add` says what can be said, the rest does it."""
