"""Bytes of a cache on a model that is not here: the store's own counting, without its memory."""
