"""What `tools/render_docs.py` is made of: for each document a file of its name, with its generated regions."""
