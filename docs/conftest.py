"""The pages' examples are tests; the scripts beside them are run by Sphinx."""

collect_ignore_glob = ["*.py", "_build", "gallery"]
