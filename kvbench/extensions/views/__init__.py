"""The extension `views`; its page is README.md."""
