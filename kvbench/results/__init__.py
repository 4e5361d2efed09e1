"""Records on disk, of a run and of a sweep: its record, its journal, its identity."""
