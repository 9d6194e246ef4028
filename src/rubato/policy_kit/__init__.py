"""Offers building blocks for policies: batches, drafted trees, KV forecasts, admission, fair shares, routing."""
