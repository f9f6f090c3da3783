"""What is measured: a folder per kind of attention call, `case` (no torch) and `measure`.

The modules here are helpers that all kinds of cases share; `form` finds a kind by its folder.
"""
