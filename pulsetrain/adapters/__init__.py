"""What other frameworks describe, as runs of ours: their settings and their modules."""
