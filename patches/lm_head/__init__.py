"""The language-model head on labelled positions only, found once per batch on the CPU."""
