"""One experiment from its configuration to its record."""
