"""The process that runs user code: reward functions, environments, agent programs."""
