"""Generation through a compressed cache."""
