"""What is measured, a folder per kind of case: `case` (no torch) and `measure`.

The modules here are helpers that the folders share; only `cases` imports the folders.
"""
