"""Values, protocols, the clock, SLOs, KV blocks, one request, one replica, plan checks, the event log: no I/O."""
