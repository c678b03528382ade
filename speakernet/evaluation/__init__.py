"""Embeddings, scores, figures with intervals and a report for a network and a trial list."""
