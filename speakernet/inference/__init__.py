"""Use a trained model file: decisions, people, export and HTTP."""
