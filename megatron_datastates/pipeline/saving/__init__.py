"""One rank's side of a save: from state to durable data files.

Belongs here: plans, the life of a save on this rank, its tail, held time. Does not belong here:
what ranks agree on (publishing), and near tiers (near).
"""
