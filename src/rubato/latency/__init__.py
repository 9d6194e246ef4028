"""Step-time models behind one interface (`rubato.interfaces.LatencyModel`)."""
