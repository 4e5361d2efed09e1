"""Extensions of kvbench, one folder each; `kvbench.config.extensions` says what a folder holds."""
