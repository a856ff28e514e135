"""Model calls are carried out: losses, the optimizer's state, the sum over ranks, and the worker that serves them."""
