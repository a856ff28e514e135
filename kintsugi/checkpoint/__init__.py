"""State that outlives processes.

snapshot.py   slots of each rank in memory that the node agent holds
store.py      durable checkpoints: Hugging Face folder and trainer state, verified, renamed into place
manifest.py   files and tensors of a checkpoint, with digests
"""
