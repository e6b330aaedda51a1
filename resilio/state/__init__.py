"""What is saved and how it comes back: the live training state as one flat dict, and the way from it to live again."""
