"""The compressed cache: pages, rings and the store that executes what a policy decides."""
