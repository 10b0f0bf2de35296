"""A simulation of 1,024 nodes that fail: which tier restores how often, and how much work is lost a day.

Arithmetic on published failure rates, nothing measured: `model.py` has all assumptions.
"""
