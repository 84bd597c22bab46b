"""Decoder layers compiled one by one, each class of them once."""
