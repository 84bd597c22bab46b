"""From a trained model to files that others load: the Hub, merged weights, GGUF."""
