"""The extension `suite`; its page is README.md."""
