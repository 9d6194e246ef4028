"""Step-time models behind one interface (`rubato.core.interfaces.LatencyModel`)."""
