"""What changes inside a model. Nothing here imports from the rest of `unsloth_trl`."""

if __name__ != "unsloth_trl.patches":
    raise ImportError("import `unsloth_trl.patches`, not `patches`: every op would be registered twice")
