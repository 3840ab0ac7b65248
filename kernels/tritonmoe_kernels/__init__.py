"""Compute kernels of tritonmoe. Imports torch and triton only; nothing of the engine."""
