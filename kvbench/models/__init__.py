"""The model of an experiment: where its files come from, what identifies it, and how it is loaded."""
