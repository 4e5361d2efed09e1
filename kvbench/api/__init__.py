"""kvbench from Python: what `import kvbench` offers beside the building blocks."""
