"""The extension `advise`; its page is README.md."""
