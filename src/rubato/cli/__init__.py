"""The command `rubato`: words in, text out. A verb a module: `add` declares the options, the rest acts on them."""
