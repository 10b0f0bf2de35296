"""State providers: what the state is, as named fragments; not how its bytes move.

Belongs here: one small class per kind of state, which says where its bytes are, how many there are (or that
the number is not known yet) and how long they stay unchanged. Does not belong here: files, threads, Megatron.
A new kind of state is a new provider and needs no change in the engine.
(After DataStates-LLM, arXiv 2601.16956, section on state providers.)
"""
