"""The cage that runs programs written by a model."""
