"""Engines behind one interface (`rubato.interfaces.Engine`)."""
