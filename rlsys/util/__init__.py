"""Small helpers without any noun of rlsys: deadlines, seeds, files, imports, signals.

Modules here import nothing of ours.
"""
