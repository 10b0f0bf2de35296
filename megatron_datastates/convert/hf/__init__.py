"""Exports models to, and imports them from, folders as Hugging Face's transformers has them.

Neither transformers nor Megatron is imported: an architecture is a table (families.py), and each tensor of
the one is made of rows of a tensor of the other (tensors.py).
"""

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"  # values of Megatron's --transformer-impl
FLOATS = ("float32", "bfloat16", "float16")  # dtypes of weights
