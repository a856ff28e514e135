"""Triton kernels of the CUDA runner. Each computes a row's bits from that row alone, whatever the others hold."""
