"""Attention over packed rows: isolation by segment lengths, never by a mask over all tokens."""
