"""Data, model and training of a small Mixture-of-Experts language model in Qwen3-MoE format.

tasks/        exact-match task families, and a safe evaluator for generated functions
stories.py    short stories from the plots in plots.toml
tokenizer.py  the byte-level BPE
corpus.py     packed token streams of text, tasks and stories
batches.py    training batches from the streams
model.py      the training-only model
optimizer.py  Muon for the matrices, AdamW for the rest
schedule.py   learning rate and load-balance weight as functions of progress
evaluation.py held-out bits per character, exact-match accuracy
trainer.py    the training loop, its saved state and its log
export.py     Hugging Face folder, splitting and joining of large files
"""
