"""What a cache would hold on a model that is not here: the store's own counting, without its memory."""
