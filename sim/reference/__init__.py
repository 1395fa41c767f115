"""The rules of residency and counts once more, to be read in one sitting; tests hold the engine to it."""
