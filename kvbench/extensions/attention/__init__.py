"""The extension `attention`; its page is README.md."""
