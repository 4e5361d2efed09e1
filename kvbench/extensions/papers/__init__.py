"""The extension `papers`; its page is README.md."""
