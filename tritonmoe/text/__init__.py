"""The text side of a model's files."""
