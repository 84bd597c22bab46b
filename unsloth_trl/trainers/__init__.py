"""Thin subclasses of TRL's trainers."""
