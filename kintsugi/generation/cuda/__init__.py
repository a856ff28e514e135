"""CUDA runner and its Triton kernels. Each kernel computes a row's bits from that row alone, whatever the other rows
hold."""
