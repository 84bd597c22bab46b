"""Experts in 4 bits: their storage, their way back to 16 bits, and loading them."""
