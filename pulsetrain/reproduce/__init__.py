"""Runs a recorded run again: for verification, for a live debugger, and for forks."""
