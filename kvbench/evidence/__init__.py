"""Comparisons, frontiers and reports of stored results. This room reads results and changes no answer."""
