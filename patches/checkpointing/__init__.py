"""Which layers keep their activations, which recompute them, and where a layer's input waits meanwhile."""
