"""Who speaks when in a recording: speech, windows of embeddings, clusters, turns, and names of people in a store."""
