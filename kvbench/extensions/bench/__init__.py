"""The extension `bench`; its page is README.md."""
