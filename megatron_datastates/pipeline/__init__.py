"""Saving and loading as a whole: wires providers, plan and engine, and agrees between ranks.

Belongs here: whole saves and their reports (saver.py, publication.py, publisher.py, report.py), and rooms for
the rest, of which each imports those below it (setup.cfg): upkeep, loading, near, publishing, saving, runs.
Does not belong here: Megatron. Other trainers can use this layer as it is.
"""
