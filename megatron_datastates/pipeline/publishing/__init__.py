"""What a save needs of all ranks: agreement, polls, indexes that ranks exchange, files beside the data.

Belongs here: the steps that publication.py takes in its order. Does not belong here: how data files come to
be (saving), and near tiers (near).
"""
