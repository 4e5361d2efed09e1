"""The extension `cluster`; its page is README.md."""
