"""What the report lines of a run show: tables, advice, a picture, and a page.

What belongs here: reading the lines that pipeline/report.py writes, and what follows from them. What
does not: making them, and anything that imports torch or the native module: `datastates report` starts at
once.
"""
