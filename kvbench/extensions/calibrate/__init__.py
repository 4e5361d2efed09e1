"""The extension `calibrate`; its page is README.md."""
