"""What stored results prove: comparisons, frontiers and reports. This room reads results and changes no answer."""
