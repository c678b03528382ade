"""Using a trained model file: decisions, people, export and HTTP."""
