"""The files that handlers keep in a run folder."""
