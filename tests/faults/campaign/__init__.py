"""The fault campaign: long, seeded, repeatable attacks on saves, files and loads (`make test-faults`).

What belongs here: the attacks, an oracle that knows each byte of a checkpoint from its iteration alone, and
the count of what happened. What does not: `datastates verify` as a judge, and tests of single known failures,
which stand beside this package.
"""
