"""Evaluate a network on a trial list: embeddings, scores, figures with intervals, and a report."""
