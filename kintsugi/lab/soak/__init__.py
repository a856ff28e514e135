"""A run under random kills and stops, compared step by step with an undisturbed twin."""
