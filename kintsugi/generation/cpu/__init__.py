"""The eager CPU runner, where nothing can be compiled."""
