"""The extension `offline`; its page is README.md."""
