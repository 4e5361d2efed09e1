"""Extensions of kvbench, one folder each; `kvbench.config.extensions` documents the contents of a folder."""
