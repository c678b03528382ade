"""From a network and a trial list to embeddings, scores, figures with intervals, and a report."""
