"""Configuration: the files there are, and the one way to compose them."""
