"""What a setting may be: its type, range and unit, declared once beside the field that holds it."""
