"""Tables, pictures and progress for people."""
