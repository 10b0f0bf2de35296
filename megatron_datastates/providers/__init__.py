"""State providers: what the state is, as named fragments; not how its bytes move.

Belongs here: one small class per kind of state, saying where bytes live, how many there are (or that
this is not known yet) and until when they stay as they are. Does not belong here: files, threads,
Megatron. A new kind of state is a new provider; the engine never learns of it.
(After DataStates-LLM, arXiv 2601.16956, section on state providers.)
"""
