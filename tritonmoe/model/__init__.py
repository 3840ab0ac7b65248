"""What a model is and computes: its description, its weights, its blocks, where its experts lie in host memory."""
