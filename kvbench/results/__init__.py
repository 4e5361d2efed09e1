"""What a run leaves on disk: its record, its journal, its identity."""
