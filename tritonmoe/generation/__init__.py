"""Tokens: sequences being continued, decode steps, sampling."""
