"""The extension `tracking`; its page is README.md."""
