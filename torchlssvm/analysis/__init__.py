"""Label errors, cross-validation and sliding windows, over heads and kernel machines alike."""
