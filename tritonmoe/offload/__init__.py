"""Experts in host memory: what to fetch, into which slot, and how."""
