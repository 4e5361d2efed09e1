"""The extension `search`; its page is README.md."""
