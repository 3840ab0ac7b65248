"""What `tools/bench.py` is made of."""
