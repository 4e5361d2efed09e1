"""Python interface: the functions that `import kvbench` exports, apart from the building blocks."""
