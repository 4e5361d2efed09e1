"""What stored results prove: comparison, frontier, calibration and report. Reads results, changes no answer."""
