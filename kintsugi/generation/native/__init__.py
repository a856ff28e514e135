"""The compiled CPU runner: one call of `kernels.cpp` per step."""
