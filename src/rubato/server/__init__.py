"""The HTTP edge: OpenAI's API with SLOs."""
