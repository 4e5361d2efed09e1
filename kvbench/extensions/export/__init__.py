"""The extension `export`; its page is README.md."""
