"""Values and protocols that every package shares: requests, plans, events, views, SLOs, the clock, the event log."""
