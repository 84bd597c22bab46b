"""What concerns a model as a whole: which architectures are verified, loading, memory estimates."""
