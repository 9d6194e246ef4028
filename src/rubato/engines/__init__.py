"""Engines behind one interface (`rubato.core.interfaces.Engine`)."""
