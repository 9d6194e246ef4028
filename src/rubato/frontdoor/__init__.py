"""How an API request is admitted, the same at each door, and how it is settled when it has ended."""
