"""Pure tensor functions, one file a theorem family."""
