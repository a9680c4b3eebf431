"""`pulsetrain watch`: a run in the terminal while it is trained, or as text."""
