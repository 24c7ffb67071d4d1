"""Why: what ran, for what reason, and how far from the limit of the machine; PyTorch's own rules written out."""
